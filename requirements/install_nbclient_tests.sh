#!/usr/bin/env bash
# Puts nbclient's source with its tests, and what only they need, into a folder: install_nbclient_tests.sh PYTHON FOLDER
# Apart from the environment, since plugins of pytest would take part in Torpor's own tests.
set -euo pipefail
python=$1 folder=$2
here=$(dirname "$0")
pip=("$python" -m pip --disable-pip-version-check --no-input)
rm -rf "$folder"
mkdir -p "$folder"
"${pip[@]}" download --quiet --no-deps --no-build-isolation --no-binary nbclient --require-hashes \
  --requirement "$here/nbclient-tests.txt" --dest "$folder/files"
"${pip[@]}" install --quiet --no-deps --target "$folder/packages" "$folder"/files/*.whl
tar -xzf "$folder"/files/nbclient-*.tar.gz -C "$folder" --one-top-level=source --strip-components=1
rm -r "$folder/files"
