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
import os, select, signal, socket, subprocess, sys
REAL, ACTION, SIGNUM, FAULT, ENOUGH = {real!r}, {action!r}, {signum}, {fault!r}, 4 << 20
arguments = sys.argv[1:]
if arguments[0] != ACTION or not os.path.exists(FAULT):
    os.execv(REAL[0], [*REAL, *arguments])

def children(pid):
    try:
        return open(f"/proc/{{pid}}/task/{{pid}}/children").read().split()
    except OSError:
        return []

def strike_in_the_middle_of_the_pages():
    place = arguments.index("--ps-socket") + 1
    worker = socket.socket(fileno=int(arguments[place]))
    ours, theirs = socket.socketpair()
    arguments[place] = str(theirs.fileno())
    criu = subprocess.Popen([*REAL, *arguments], close_fds=False)
    theirs.close()
    passed = 0
    while passed < ENOUGH:
        for ready in select.select([ours, worker], [], [])[0]:
            piece = ready.recv(1 << 16)
            (worker if ready is ours else ours).sendall(piece)
            passed += len(piece)
    return criu

def strike_when_processes_exist():
    criu = subprocess.Popen([*REAL, *arguments], close_fds=False)
    while criu.poll() is None and not any(children(child) for child in children(criu.pid)):
        pass
    return criu

criu = strike_in_the_middle_of_the_pages() if ACTION == "dump" else strike_when_processes_exist()
criu.send_signal(SIGNUM)
status = criu.wait()
sys.exit(status if status >= 0 else 128 - status)
"""


def silent(folder: Path) -> Path:
    """A CRIU that tells its version and then never does anything, nor ends when it is asked to."""
    return _program(folder / "silent-criu", ANSWERS_NOTHING)


def stricken(folder: Path, action: str, signum: int, fault: Path) -> Path:
    """The real CRIU, which gets a signal in the middle of `action` as long as the file `fault` exists: at a dump when
    it has sent 4 MiB of memory and nobody takes more, at a restore when there are processes. 0: it only gets stuck."""
    real = require_criu(from_environment({}), {"PATH": os.environ["PATH"]}).argv
    text = STRICKEN.format(python=sys.executable, real=list(real), action=action, signum=int(signum), fault=str(fault))
    return _program(folder / f"{action}-criu", text)


def _program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path
