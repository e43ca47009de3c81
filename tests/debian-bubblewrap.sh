#!/bin/sh
# Unpack Debian's bubblewrap into a folder: nothing is installed, no root is needed, and the system's lists of packages stay
# as they are. What starts it is FOLDER/bwrap, there only if it starts.
set -eu
command -v apt-get > /dev/null && command -v dpkg > /dev/null || { echo "no apt-get here, so no bubblewrap" >&2; exit 1; }
mkdir -p "$1/packages" "$1/lists/partial" "$1/cache"
folder=$(cd "$1" && pwd)
cd "$folder/packages"

own() { # lists of our own, where the system has none or old ones
  set -- -o Dir::State::Lists="$folder/lists" -o Dir::Cache="$folder/cache"
  apt-get "$@" update -q && apt-get "$@" download -q bubblewrap
}
apt-get download -q bubblewrap || own
for package in *.deb; do dpkg -x "$package" ../root; done
../root/usr/bin/bwrap --version
mv ../root/usr/bin/bwrap ../bwrap
