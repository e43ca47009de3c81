#!/bin/sh
# Unpack Debian's redis-server, which speaks TLS, into a folder: nothing is installed, no root is needed, and the
# system's lists of packages stay as they are. What starts it is FOLDER/redis-server, there only if it starts.
set -eu
command -v apt-get > /dev/null && command -v dpkg > /dev/null || { echo "no apt-get here, so no redis-server that speaks TLS" >&2; exit 1; }
mkdir -p "$1/packages" "$1/lists/partial" "$1/cache"
folder=$(cd "$1" && pwd)
cd "$folder/packages"
packages='redis-server redis-tools liblzf1 libjemalloc2'

fetch() { # shellcheck disable=SC2086
  apt-get "$@" download -q $packages
}
own() { # lists of our own, where the system has none or old ones
  set -- -o Dir::State::Lists="$folder/lists" -o Dir::Cache="$folder/cache"
  apt-get "$@" update -q && fetch "$@"
}
fetch || own
for package in *.deb; do dpkg -x "$package" ../root; done
libraries=$(dirname "$(find "$folder/root" -name liblzf.so.1 | head -n 1)")
cat > ../starts <<END
#!/bin/sh
LD_LIBRARY_PATH='$libraries' exec '$folder/root/usr/bin/redis-server' "\$@"
END
chmod +x ../starts
../starts --version
mv ../starts ../redis-server
