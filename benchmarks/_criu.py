"""The peer: CRIU's own dump to files and its own restore from them, as fast as it can be run by itself.

Run as a program (`_criu.py FOLDER`) it restores from a folder inside a mount namespace of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from torpor.engine import dump, images, private_mounts
from torpor.engine.criu_binary import require_criu
from torpor.paths import from_environment

COMMON = ("--tcp-close", "--ext-unix-sk", "--file-locks", "--manage-cgroups=ignore", "-v1", "--log-file", "log")


def dump_to_files(init: int, folder: Path, *, leave_running: bool, sync: bool) -> dict[str, float]:
    """Seconds until CRIU has ended (and, with `sync`, until its files are on the disk), and seconds frozen."""
    folder.mkdir()
    command = [
        *require_criu(from_environment({})).argv,
        *("dump", "--tree", str(init), "--images-dir", str(folder), "--ghost-limit", "1G"),
        *("--external", "mnt[]:m", "--external", dump.SHARED_MEMORY),
        *(("--leave-running",) if leave_running else ()),
        *COMMON,
    ]
    started = time.monotonic()
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    seconds = {"seconds to page cache": time.monotonic() - started}
    if sync:
        for path in [*folder.iterdir(), folder]:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        seconds["seconds until durable"] = time.monotonic() - started
    return seconds | {"seconds frozen": images.frozen_seconds(folder)}


def restore_from_files(folder: Path) -> tuple[float, int]:
    """Seconds until CRIU has restored the tree, which runs then, and the init's pid on the node."""
    done = subprocess.run([sys.executable, __file__, str(folder)], check=True, capture_output=True, text=True)
    answer = json.loads(done.stdout)
    return float(answer["seconds"]), int(answer["pid"])


def _restore(folder: Path) -> None:
    private_mounts.enter()
    root, shared_memory = folder / "root", folder / "shm"
    for place in (root, shared_memory):
        place.mkdir(exist_ok=True)
    private_mounts.tmpfs(shared_memory, options="mode=1777")
    private_mounts.bind_root(root)
    command = [
        *require_criu(from_environment({})).argv,
        *("restore", "--restore-detached", "--images-dir", str(folder), "--pidfile", str(folder / "pid")),
        *("--external", "mnt[]:m", "--external", f"mnt[shm]:{shared_memory}", "--root", str(root)),
        *COMMON,
    ]
    started = time.monotonic()
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    print(json.dumps({"seconds": time.monotonic() - started, "pid": int((folder / "pid").read_text())}))


if __name__ == "__main__":
    _restore(Path(sys.argv[1]))
