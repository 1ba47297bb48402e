#!/usr/bin/env bash
# Installs Chromium, in which the tests open JupyterLab as people do, unless it is there.
set -euo pipefail
if command -v chromium > /dev/null; then
  exit
fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get > /dev/null; then
  echo "The tests need Chromium. As root: apt-get install chromium" >&2
  exit 1
fi
echo "Installing Chromium, in which the tests open JupyterLab"
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium > /dev/null
