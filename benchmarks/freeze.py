"""Checkpoint: how long the session stands still, against CRIU's own frozen time for a dump to files."""

from __future__ import annotations

from _criu import dump_to_files
from _memory import a_session
from _report import GIB, Report, Sample, interleave, options
from torpor.model import OperationKind


def main() -> None:
    chosen = options(__doc__, gib=2.0, rounds=5)
    size = int(chosen.gib * GIB)
    report = Report(f"Freeze of a checkpoint of {chosen.gib:g} GiB of random memory")

    def ours() -> Sample:
        with a_session(size) as memory:
            wall, result = memory.operate(OperationKind.CHECKPOINT)
            assert memory.answer() == memory.sum
        return {"seconds frozen": result["seconds"]["freeze"], "seconds in all": wall}

    def criu() -> Sample:
        with a_session(size) as memory:
            return dump_to_files(memory.pid, memory.folder, leave_running=True, sync=False)

    interleave(chosen.rounds, report, ("torpor", ours), ("criu", criu))
    report.ratio("frozen: torpor / criu (aim 0.333)", "torpor: seconds frozen", "criu: seconds frozen")
    report.print(as_json=chosen.json)


if __name__ == "__main__":
    main()
