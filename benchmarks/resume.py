"""Resume: to the first answer and to the end, against CRIU's own restore from images that lie in the page cache."""

from __future__ import annotations

import threading
import time

from _criu import dump_to_files, restore_from_files
from _memory import a_session, end_tree, fill
from _report import Report, Sample, interleave, options
from torpor.model import OperationKind

MIB = 1 << 20


def measure(report: Report, mib: int, rounds: int) -> None:
    def ours() -> Sample:
        answered: list[float] = []

        def ask() -> None:
            assert memory.answer() == memory.sum
            answered.append(time.monotonic())

        with a_session(mib * MIB) as memory:
            memory.operate(OperationKind.HIBERNATE)
            asking = threading.Thread(target=ask)
            started = time.monotonic()
            asking.start()
            wall, _ = memory.operate(OperationKind.RESUME)
            asking.join()
        return {f"{mib} MiB, first answer": answered[0] - started, f"{mib} MiB, complete": wall}

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

    interleave(rounds, report, ("torpor", ours), ("criu", criu), ("fill of fresh memory", limit))
    for figure in ("first answer", "complete"):
        report.ratio(
            f"{mib} MiB, {figure}: torpor / criu from page cache",
            f"torpor: {mib} MiB, {figure}",
            f"criu: {mib} MiB, complete",
        )


def main() -> None:
    chosen = options(__doc__, large=2048, small=200, rounds=5)
    report = Report("Resuming sessions of random memory")
    measure(report, chosen.small, chosen.rounds)
    measure(report, chosen.large, chosen.rounds)
    report.print(as_json=chosen.json)


if __name__ == "__main__":
    main()
