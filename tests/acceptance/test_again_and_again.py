"""Twenty times away and back: a training that is not disturbed by a single bit, and a session that does not grow."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.acceptance.traces import assert_as_before, traces
from tests.installation import PATIENCE, Installation, eventually

CYCLES = 20
TRAINER = Path(__file__).with_name("trainer.py")


def ask(folder: Path, number: int) -> str:
    (folder / f"train-{number}").touch()
    answer = folder / f"losses-{number}"
    eventually(answer.exists, bool)
    return answer.read_text()


def uninterrupted(folder: Path) -> list[str]:
    folder.mkdir()
    for number in range(CYCLES + 1):
        (folder / f"train-{number}").touch()
    with subprocess.Popen([sys.executable, str(TRAINER), str(folder)], stdin=subprocess.DEVNULL) as training:
        try:
            last = folder / f"losses-{CYCLES}"
            eventually(lambda: last.exists() or training.poll() is not None, bool, PATIENCE)
        finally:
            training.kill()
    return [(folder / f"losses-{number}").read_text() for number in range(CYCLES + 1)]


def body(agent: Installation, name: str) -> dict[str, Any]:
    """What of a session could grow from cycle to cycle: mounts, descriptors, mappings, threads, processes."""
    pids = agent.client.session(name)["pids"]
    return {
        "processes": len(pids),
        "threads": [len(os.listdir(f"/proc/{pid}/task")) for pid in pids],
        "mounts": [len(Path(f"/proc/{pid}/mountinfo").read_text().splitlines()) for pid in pids],
        "descriptors": [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids],
        "mappings": [named_mappings(pid) for pid in pids],
    }


def named_mappings(pid: int) -> Counter[str]:
    """Mappings of files; of anonymous memory an allocator may always make more."""
    lines = [line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return Counter(fields[5].strip() for fields in lines if len(fields) == 6)


def test_twenty_cycles_leave_a_training_and_its_session_as_they_were(
    shared_agent: Installation, tmp_path: Path
) -> None:
    expected = uninterrupted(tmp_path / "uninterrupted")
    folder = tmp_path / "away"
    folder.mkdir()
    shared_agent.run(sys.executable, str(TRAINER), str(folder), name="training")
    found = [ask(folder, 0)]
    before = after_one = None
    for number in range(1, CYCLES + 1):
        shared_agent.operate("training", "hibernate")
        shared_agent.operate("training", "resume")
        found.append(ask(folder, number))
        if number == 1:
            before, after_one = traces(shared_agent), body(shared_agent, "training")
    assert found == expected
    assert before is not None
    assert body(shared_agent, "training") == after_one
    assert_as_before(shared_agent, before)
    shared_agent.client.remove("training", force=True)
