#!/usr/bin/env bash
# Writes the locked requirements anew from pyproject.toml. UV names the uv program (default: uv).
set -euo pipefail
cd "$(dirname "$0")/.."
uv=${UV:-uv}

compile() { # output, arguments of uv pip compile
  local output=$1
  shift
  "$uv" pip compile "$@" --universal --python-version 3.11 --generate-hashes --no-header --quiet -o "$output"
  # Torpor runs on Linux and CPython only: the markers that say so on every line are noise.
  sed -i -E \
    -e "s/ and implementation_name == 'cpython' and sys_platform == 'linux'//" \
    -e "s/implementation_name == 'cpython' and //" \
    -e "s/ ; sys_platform == 'linux'//" \
    -e "s/ ; platform_python_implementation != 'PyPy' and sys_platform == 'linux'//" "$output"
}

compile requirements/runtime.txt pyproject.toml
compile requirements/dev.txt pyproject.toml --extra dev -c requirements/runtime.txt

# PyTorch's CPU build, which some machines have at hand, needs these few; the build on the public index wants NVIDIA's
# libraries, too, and has a lock of its own so that nobody with the CPU build downloads them.
needs=$(mktemp)
trap 'rm -f "$needs"' EXIT
printf '%s\n' filelock fsspec jinja2 networkx 'setuptools>=77.0.3' sympy 'typing-extensions>=4.10' > "$needs"
compile requirements/torch.txt "$needs" --no-annotate -c requirements/dev.txt
echo 'torch==2.13.0' > "$needs"
compile requirements/torch-cuda.txt "$needs" --no-annotate -c requirements/dev.txt -c requirements/torch.txt
python3 - <<'PYTHON'
"""Adds the CPU build to torch.txt: one hash a file, since pip prefers whatever an index lists with a locked hash."""
from pathlib import Path

CPU_BUILD = "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"  # 2.13.0+cpu, cp311, x86_64
plain = Path("requirements/torch.txt")
plain.write_text(f"{plain.read_text()}torch==2.13.0 \\\n    --hash=sha256:{CPU_BUILD}\n")
PYTHON
