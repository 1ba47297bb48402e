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

# PyTorch's CPU build, which some machines have at hand, needs these; the build on the public index also wants NVIDIA's
# libraries, which stand apart so that nobody with the CPU build downloads them.
needs=$(mktemp)
trap 'rm -f "$needs"' EXIT
printf '%s\n' filelock fsspec jinja2 networkx 'setuptools>=77.0.3' sympy 'typing-extensions>=4.10' > "$needs"
compile requirements/torch.txt "$needs" --no-annotate -c requirements/dev.txt
echo 'torch==2.13.0' > "$needs"
compile requirements/torch-cuda.txt "$needs" --no-annotate -c requirements/dev.txt -c requirements/torch.txt
python3 - <<'PYTHON'
"""Moves torch itself to torch.txt, beside the hash of the CPU build, and leaves only the rest in torch-cuda.txt."""
import re
from pathlib import Path

CPU_BUILDS = {"6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b": "2.13.0+cpu, cp311, x86_64"}
plain, cuda = Path("requirements/torch.txt"), Path("requirements/torch-cuda.txt")
own = set(re.findall(r"^([a-z0-9-]+)==", plain.read_text(), re.M))
blocks = re.split(r"^(?=[a-z])", cuda.read_text(), flags=re.M)
torch = next(block for block in blocks if block.startswith("torch=="))
hashes = sorted({*re.findall(r"sha256:(\w+)", torch), *CPU_BUILDS})
lines = " \\\n".join(["torch==2.13.0", *(f"    --hash=sha256:{digest}" for digest in hashes)])
plain.write_text(plain.read_text() + lines + "\n")
kept = [block for block in blocks if (name := re.match(r"[a-z0-9-]+(?===)", block)) and name[0] not in {*own, "torch"}]
cuda.write_text("-r torch.txt\n" + "".join(kept))
PYTHON
