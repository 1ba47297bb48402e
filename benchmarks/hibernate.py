"""Hibernate: from the start of the worker to a durable manifest, against CRIU's own dump to files on the same disk."""

from __future__ import annotations

from _criu import dump_to_files
from _memory import a_session
from _report import GIB, Report, Sample, interleave, options
from torpor.model import OperationKind


def main() -> None:
    chosen = options(__doc__, gib=2.0, rounds=5)
    size = int(chosen.gib * GIB)
    report = Report(f"Hibernating {chosen.gib:g} GiB of random memory")

    def ours() -> Sample:
        with a_session(size) as memory:
            wall, result = memory.operate(OperationKind.HIBERNATE)
        seconds = result["seconds"]
        durable = wall - seconds["total"] + sum(seconds[lap] for lap in ("preflight", "buffers", "transfer", "durable"))
        return {
            "seconds until durable": durable,
            "seconds until verified": durable + seconds["verify"],
            "seconds in all": wall,
        }

    def criu() -> Sample:
        with a_session(size) as memory:
            return dump_to_files(memory.pid, memory.folder, leave_running=False, sync=True)

    interleave(chosen.rounds, report, ("torpor", ours), ("criu", criu))
    report.ratio("durable: torpor / criu (aim 0.5)", "torpor: seconds until durable", "criu: seconds until durable")
    report.ratio("verified: torpor / criu durable", "torpor: seconds until verified", "criu: seconds until durable")
    report.print(as_json=chosen.json)


if __name__ == "__main__":
    main()
