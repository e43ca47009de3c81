#!/bin/sh
# Unpack Debian's redis-server, which speaks TLS, into a folder: nothing is installed, and no root is needed. What
# starts it is FOLDER/redis-server.
set -eu
folder=$1
mkdir -p "$folder/packages"
cd "$folder/packages"
packages='redis-server redis-tools liblzf1 libjemalloc2'
# shellcheck disable=SC2086
apt-get download -q $packages || { apt-get update -q && apt-get download -q $packages; }
for package in *.deb; do dpkg -x "$package" ../root; done
libraries=$(dirname "$(find "$(pwd)/../root" -name 'liblzf.so.1' | head -n 1)")
cat > ../redis-server <<END
#!/bin/sh
LD_LIBRARY_PATH=$libraries exec $folder/root/usr/bin/redis-server "\$@"
END
chmod +x ../redis-server
../redis-server --version
