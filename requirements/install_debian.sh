#!/usr/bin/env bash
# Installs the Debian packages of debian.txt, which the tests take through a hibernation, as far as they are missing.
set -euo pipefail
cd "$(dirname "$0")"

missing=()
while read -r package; do
  dpkg-query --show --showformat '${Status}' "$package" 2> /dev/null | grep -q ' installed$' || missing+=("$package")
done < debian.txt
[ ${#missing[@]} -eq 0 ] && exit
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get > /dev/null; then
  echo "The tests need ${missing[*]}. As root: apt-get install ${missing[*]}" >&2
  exit 1
fi
echo "Installing ${missing[*]}, which the tests hibernate"
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" > /dev/null
