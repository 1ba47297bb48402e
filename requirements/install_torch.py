"""Installs the locked PyTorch into this interpreter's environment.

pip takes PyTorch's CPU build where the machine has one at hand (a local folder of wheels, or an index that pip is
configured with). The build on the public index is a CUDA build, whose NVIDIA libraries are several GB; it is locked in
a file of its own, used only when pip would take that build. With `--if-small` nothing is installed then.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

LOCKS = Path(__file__).parent
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet"]


def locked_version() -> str:
    """The version that torch.txt names."""
    lines = (LOCKS / "torch.txt").read_text().splitlines()
    return next(line.split("==")[1].split()[0] for line in lines if line.startswith("torch=="))


def wants_cuda(version: str) -> bool:
    """Whether the build that pip would take here needs NVIDIA's libraries. Reads its metadata, not the build."""
    question = [*PIP, "--dry-run", "--no-deps", "--ignore-installed", "--report", "-", f"torch=={version}"]
    answer = subprocess.run(question, stdout=subprocess.PIPE, text=True, check=True)
    (build,) = json.loads(answer.stdout)["install"]
    return any(need.startswith(("nvidia-", "cuda-", "triton")) for need in build["metadata"].get("requires_dist", []))


def main() -> None:
    """Installs the build that suits this machine."""
    version = locked_version()
    lock = "torch-cuda.txt" if wants_cuda(version) else "torch.txt"
    if lock == "torch-cuda.txt":
        if "--if-small" in sys.argv:
            sys.stdout.write(f"PyTorch {version} would be a download of several GB here: going on without it.\n")
            return
        sys.stdout.write(f"PyTorch {version} comes with NVIDIA's libraries here: several GB are downloaded once.\n")
        sys.stdout.flush()
    subprocess.run([*PIP, "--require-hashes", "--requirement", str(LOCKS / lock)], check=True)


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as failure:
        sys.exit(f"PyTorch was not installed: pip ended with {failure.returncode}; its own words stand above.")
