"""A second checkpoint of a session that did nothing meanwhile: how much of it is new."""

from __future__ import annotations

from _memory import a_session
from _report import GIB, Report, Sample, interleave, options
from torpor.model import OperationKind

MIB = 1 << 20


def main() -> None:
    chosen = options(__doc__, gib=1.0, rounds=3)
    report = Report(f"Second checkpoint of an unchanged session of {chosen.gib:g} GiB")

    def twice() -> Sample:
        with a_session(int(chosen.gib * GIB)) as memory:
            first_wall, first = memory.operate(OperationKind.CHECKPOINT)
            second_wall, second = memory.operate(OperationKind.CHECKPOINT)
        return {
            "first, new MiB": first["bytes_new"] / MIB,
            "second, new MiB": second["bytes_new"] / MIB,
            "first, seconds": first_wall,
            "second, seconds": second_wall,
        }

    interleave(chosen.rounds, report, ("torpor", twice))
    report.ratio("new bytes: second / first (aim 0.01)", "torpor: second, new MiB", "torpor: first, new MiB")
    report.print(as_json=chosen.json)


if __name__ == "__main__":
    main()
