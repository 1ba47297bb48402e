"""Resume: to the first answer, to one that touches all memory, and until all of it is there, for three sizes; beside
CRIU's own restore from images that lie in the page cache, and a plain fill of fresh memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from _criu import dump_to_files, restore_from_files
from _memory import EVERYWHERE, HARDLY, Memory, a_session, end_tree, fill
from _report import Report, Sample, interleave, options
from torpor.model import OperationKind

MIB = 1 << 20


def resumed(memory: Memory, step: int, must: int) -> tuple[float, float]:
    """Seconds from the start of a resume to the session's first answer, and until the resume is complete."""
    answered: list[float] = []

    def ask() -> None:
        assert memory.answer(step) == must
        answered.append(time.monotonic())

    asking = threading.Thread(target=ask)
    started = time.monotonic()
    asking.start()
    wall, _ = memory.operate(OperationKind.RESUME)
    asking.join()
    return answered[0] - started, wall


def measure(report: Report, mib: int, rounds: int) -> None:
    def ours() -> Sample:
        with a_session(mib * MIB) as memory:
            first = memory.answer(HARDLY)
            memory.operate(OperationKind.HIBERNATE)
            answer, complete = resumed(memory, HARDLY, first)
            assert memory.answer() == memory.sum
            memory.operate(OperationKind.HIBERNATE)
            everything, _ = resumed(memory, EVERYWHERE, memory.sum)
        return {
            f"{mib} MiB, first answer": answer,
            f"{mib} MiB, answer that touches everything": everything,
            f"{mib} MiB, complete": complete,
        }

    def criu() -> Sample:
        with a_session(mib * MIB) as memory:
            dump_to_files(memory.pid, memory.folder, leave_running=False, sync=True)
            seconds, pid = restore_from_files(memory.folder)
            try:
                assert memory.answer() == memory.sum
            finally:
                end_tree(pid)
        return {f"{mib} MiB, complete": seconds}

    def limit() -> Sample:
        return {f"{mib} MiB": fill(mib * MIB)}

    contenders: list[tuple[str, Callable[[], Sample]]] = [("torpor", ours), ("fill of fresh memory", limit)]
    interleave(rounds, report, *contenders, ("criu", criu))
    for figure in ("first answer", "complete"):
        report.ratio(
            f"{mib} MiB, {figure}: torpor / criu from page cache",
            f"torpor: {mib} MiB, {figure}",
            f"criu: {mib} MiB, complete",
        )


def main() -> None:
    chosen = options(__doc__, small=200, large=2048, huge=8192, rounds=5)
    report = Report("Resuming sessions of random memory")
    for mib in (chosen.small, chosen.large, chosen.huge):
        measure(report, mib, chosen.rounds if mib <= chosen.large else min(chosen.rounds, 3))
    report.print(as_json=chosen.json)


if __name__ == "__main__":
    main()
