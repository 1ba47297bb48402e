"""A process that makes checkpoints and may be told to kill itself right after its N-th write to the file system.

`python crasher.py FOLDER N` prints the name of each checkpoint once its commit has returned. N = 0: never.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torpor.store import Manifest, Object, Store

KEY = bytes(range(32))
PAGE = 4096
WRITES = ("pwrite", "fsync", "rename", "link", "unlink", "mkdir")


def contents(checkpoint: str) -> bytes:
    """What checkpoint `cN` holds: half of it is shared by all."""
    return bytes(range(256)) * 16 * 8 + checkpoint.encode().ljust(PAGE, b"!") * 8


def checkpoint(store: Store, name: str) -> None:
    """Make checkpoint `name` of session `s`."""
    data = contents(name)
    cuts = list(range(PAGE, len(data) + 1, PAGE))
    with store.writer(threads=1) as writer:
        chunks = b"".join(writer.put(memoryview(data), cuts))
        writer.seal()
        writer.commit(
            Manifest(
                site="site",
                key_id=store.key_id,
                domain="site",
                chunker="fixed",
                cipher="none",
                session="s",
                checkpoint=name,
                created=1.0,
                objects={"memory": Object(len(data), chunks, [PAGE] * len(cuts))},
            )
        )
        print(name, flush=True)
        writer.verify()


def die_after(count: int) -> None:
    """Let this process kill itself when it has made `count` writes."""
    done = 0
    lock = threading.Lock()

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def write(*arguments: Any, **named: Any) -> Any:
            nonlocal done
            result = call(*arguments, **named)
            with lock:
                done += 1
                if done == count:
                    os.kill(os.getpid(), signal.SIGKILL)
            return result

        return write

    for name in WRITES:
        setattr(os, name, counted(getattr(os, name)))


if __name__ == "__main__":
    if int(sys.argv[2]):
        die_after(int(sys.argv[2]))
    with Store.open(Path(sys.argv[1]), KEY, create=True) as opened:
        number = 0
        while number < 2 or not int(sys.argv[2]):
            number += 1
            checkpoint(opened, f"c{number}")
