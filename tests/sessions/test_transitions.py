"""Real sessions, saved and brought back by real workers."""

from __future__ import annotations

from tests.sessions.stage import Stage

from torpor.engine import procfs
from torpor.model import OperationKind, State

COUNTER = """
import hashlib, os, sys, threading, time
data = bytearray(os.urandom(32 << 20))
zeros = bytearray(64 << 20)
digest = hashlib.sha256(data).hexdigest()
threading.Thread(target=lambda: [time.sleep(0.1) for _ in iter(int, 1)], daemon=True).start()
count = 0
while True:
    count += 1
    print(count, hashlib.sha256(data).hexdigest() == digest and not any(zeros[::4096]), flush=True)
    time.sleep(0.1)
"""


def counted(lines: list[str]) -> bool:
    """Whether the lines are 1, 2, 3…, each with intact memory."""
    return [line.split() for line in lines] == [[str(number), "True"] for number in range(1, len(lines) + 1)]


def test_a_session_is_hibernated_and_resumed_again_and_again(stage: Stage) -> None:
    session = stage.start(COUNTER)
    for _ in range(3):
        before = len(stage.wait_for_output(session, lambda lines: len(lines) >= 2))
        running = stage.session(session)
        assert running.init is not None
        saved = stage.run(running, OperationKind.HIBERNATE)
        assert stage.session(session).state is State.HIBERNATED
        assert not procfs.alive(running.init.pid, running.init.start_time, running.init.boot_id)
        assert saved.result is not None
        assert saved.result["bytes_logical"] > 32 << 20
        assert set(saved.result["seconds"]) >= {"freeze", "transfer", "durable", "verify", "total"}
        stage.run(stage.session(session), OperationKind.RESUME)
        assert stage.session(session).state is State.RUNNING
        lines = stage.wait_for_output(session, lambda lines, before=before: len(lines) > before + 3)
        assert counted(lines)


def test_a_checkpoint_leaves_the_session_running_and_shares_what_did_not_change(stage: Stage) -> None:
    session = stage.start(COUNTER)
    stage.wait_for_output(session, lambda lines: len(lines) >= 2)
    first = stage.run(session, OperationKind.CHECKPOINT).result
    second = stage.run(session, OperationKind.CHECKPOINT).result
    assert first is not None
    assert second is not None
    assert second["bytes_new"] < first["bytes_new"] / 10
    here = len(stage.output(session))
    assert counted(stage.wait_for_output(session, lambda lines: len(lines) > here + 3))
    assert [checkpoint.id for checkpoint in stage.registry.checkpoints(session.id)] == [second["id"], first["id"]]


AFFINITY = """
import os, threading, time
os.sched_setaffinity(0, {0})
def other():
    os.sched_setaffinity(0, {1})
    while True:
        print("thread", sorted(os.sched_getaffinity(0)), flush=True)
        time.sleep(0.1)
threading.Thread(target=other, daemon=True).start()
while True:
    print("main", sorted(os.sched_getaffinity(0)), open("/proc/self/cgroup").read().split(), flush=True)
    time.sleep(0.1)
"""


def test_threads_stay_on_their_processors_and_the_session_in_its_cgroup(stage: Stage) -> None:
    session = stage.start(AFFINITY)
    before = set(stage.wait_for_output(session, lambda lines: len(set(lines)) == 2))
    stage.run(session, OperationKind.HIBERNATE)
    here = len(stage.output(session))
    stage.run(stage.session(session), OperationKind.RESUME)
    lines = stage.wait_for_output(session, lambda lines: len(lines) >= here + 6)
    assert set(lines[here:]) <= before


IDENTITY = """
import ctypes, os, time
def status():
    wanted = ("Uid", "Gid", "Groups", "Umask", "CapEff", "CapPrm", "CapBnd", "CapAmb", "NoNewPrivs")
    lines = [line.split() for line in open("/proc/self/status")]
    return [line for line in lines if line[0].rstrip(":") in wanted]
shared = open("/dev/shm/mine", "w+")
shared.write("kept"); shared.flush()
while True:
    shared.seek(0)
    print(status(), shared.read(), oct(os.stat("/dev/shm/mine").st_uid), flush=True)
    time.sleep(0.1)
"""


def test_a_session_of_another_user_comes_back_as_that_user_with_nothing_more(stage: Stage) -> None:
    session = stage.start(IDENTITY, uid=12345)
    before = set(stage.wait_for_output(session, lambda lines: len(lines) >= 2))
    assert len(before) == 1
    for kind in (OperationKind.CHECKPOINT, OperationKind.HIBERNATE, OperationKind.RESUME):
        stage.run(stage.session(session), kind)
    here = len(stage.output(session))
    lines = stage.wait_for_output(session, lambda lines: len(lines) >= here + 3)
    assert set(lines) == before
