"""Programs to be named by TORPOR_CRIU: the real CRIU with a fault, or something that only claims to be one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from torpor.engine.criu_binary import require_criu
from torpor.paths import from_environment

ANSWERS_NOTHING = """#!/bin/sh
case "$1" in
--version) echo "Version: 4.2.1" ;;
*) trap "" TERM; while :; do sleep 1000; done ;;
esac
"""
STRICKEN = """#!{python}
import os, signal, subprocess, sys, time
REAL, ACTION, SIGNUM, FAULT = {real!r}, {action!r}, {signum}, {fault!r}
if sys.argv[1] != ACTION or not os.path.exists(FAULT):
    os.execv(REAL[0], [*REAL, *sys.argv[1:]])
criu = subprocess.Popen([*REAL, *sys.argv[1:]], close_fds=False)

def children(pid):
    try:
        return open(f"/proc/{{pid}}/task/{{pid}}/children").read().split()
    except OSError:
        return []

def struck():
    if ACTION == "restore":
        return any(children(child) for child in children(criu.pid))
    init = sys.argv[sys.argv.index("--tree") + 1]
    return f"TracerPid:\\t{{criu.pid}}\\n" in open(f"/proc/{{init}}/status").read()

while not struck() and criu.poll() is None:
    pass
criu.send_signal(SIGNUM)
status = criu.wait()
sys.exit(status if status >= 0 else 128 - status)
"""


def silent(folder: Path) -> Path:
    """A CRIU that tells its version and then never does anything, nor ends when it is asked to."""
    return _program(folder / "silent-criu", ANSWERS_NOTHING)


def stricken(folder: Path, action: str, signum: int, fault: Path) -> Path:
    """The real CRIU, which gets a signal in the middle of `action` (dump: the tree is frozen; restore: its processes
    exist) as long as the file `fault` exists."""
    real = require_criu(from_environment({}), {"PATH": os.environ["PATH"]}).argv
    text = STRICKEN.format(python=sys.executable, real=list(real), action=action, signum=int(signum), fault=str(fault))
    return _program(folder / f"{action}-criu", text)


def _program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path
