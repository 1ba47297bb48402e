#!/usr/bin/env bash
# Makes the virtual environment $1 with the first Python >= 3.11 that works; PYTHON names another one.
set -euo pipefail
target=$1

is_new_enough() { # A command of that name may be there and still not start (version managers leave such).
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null
}

find_python() {
  local name
  for name in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14 /usr/bin/python3}; do
    if command -v "$name" > /dev/null && is_new_enough "$name"; then
      command -v "$name"
      return
    fi
  done
  echo "Torpor needs Python 3.11 or newer, and found none. On Debian 12 and 13: apt-get install python3 python3-venv." >&2
  return 1
}

can_make_venv() {
  "$1" -c 'import ensurepip, venv' 2> /dev/null
}

install_venv_package() { # Debian ships Python without ensurepip.
  local package
  package=$("$1" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
  if [ "$(id -u)" -ne 0 ] || ! command -v apt-get > /dev/null; then
    echo "$1 cannot make virtual environments. As root: apt-get install $package" >&2
    return 1
  fi
  echo "Installing $package, which $1 needs to make a virtual environment"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$package" > /dev/null
}

python=$(find_python)
can_make_venv "$python" || install_venv_package "$python"
"$python" -m venv "$target"
