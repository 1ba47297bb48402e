from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engine.stage import PYTHON, eventually

from torpor.engine import procfs
from torpor.errors import NotFound, NotPermitted

FIRST_THREAD_ENDS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(1000,)).start()
ctypes.CDLL(None).pthread_exit(None)
"""
FAMILY = """
import os, time
if os.fork() == 0:
    os.fork()
time.sleep(1000)
"""


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen(["sleep", "1000"])
    yield started
    started.kill()
    started.wait()


def test_a_process_is_known_by_pid_start_time_and_boot(child: subprocess.Popen[bytes]) -> None:
    pid, start_time = procfs.identify(child.pid)
    assert pid == child.pid
    assert procfs.alive(pid, start_time, procfs.boot_id())
    assert not procfs.alive(pid, start_time + 1, procfs.boot_id())
    assert not procfs.alive(pid, start_time, "another boot")


def test_a_zombie_has_a_start_time_but_is_not_alive(child: subprocess.Popen[bytes]) -> None:
    pid, start_time = procfs.identify(child.pid)
    child.kill()
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert procfs.start_time(pid) == start_time
    assert not procfs.alive(pid, start_time, procfs.boot_id())
    assert procfs.tree(pid) == []
    child.wait()
    assert procfs.start_time(pid) is None
    with pytest.raises(NotFound):
        procfs.identify(pid)


def test_a_process_whose_first_thread_has_ended_is_alive() -> None:
    with subprocess.Popen([PYTHON, "-I", "-S", "-c", FIRST_THREAD_ENDS]) as process:
        pid, start_time = procfs.identify(process.pid)
        eventually(
            lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0], lambda state: state == "Z"
        )
        assert procfs.alive(pid, start_time, procfs.boot_id())
        process.kill()


def test_a_process_may_have_any_name(tmp_path: os.PathLike[str]) -> None:
    odd = os.path.join(tmp_path, "a) Z 1 (b")
    os.symlink("/bin/sleep", odd)
    with subprocess.Popen([odd, "1000"]) as process:
        eventually(lambda: "a) Z" in Path(f"/proc/{process.pid}/comm").read_text())
        assert procfs.alive(*procfs.identify(process.pid), procfs.boot_id())
        process.kill()


def test_tree_lists_the_first_process_first_and_its_descendants() -> None:
    with subprocess.Popen([PYTHON, "-I", "-S", "-c", FAMILY]) as process:
        tree = eventually(lambda: procfs.tree(process.pid), lambda found: len(found) == 3)
        assert tree[0] == process.pid
        assert procfs.rss_bytes(tree) > procfs.rss_bytes(tree[:1]) > 0
        for pid in tree:
            os.kill(pid, signal.SIGKILL)


def test_cpu_seconds_count_children_that_were_waited_for() -> None:
    before = procfs.cpu_seconds([os.getpid()])
    subprocess.run([sys.executable, "-I", "-S", "-c", "sum(range(6_000_000))"], check=True)
    assert procfs.cpu_seconds([os.getpid()]) >= before + 0.05
    assert procfs.cpu_seconds([2**22 - 1]) == 0.0


def test_caller_facts_are_those_of_the_kernel() -> None:
    facts = procfs.caller_facts(os.getpid(), os.getuid(), os.getgid())
    assert facts.groups == tuple(os.getgroups())
    assert set(facts.affinity) == os.sched_getaffinity(0)
    assert facts.nice == os.getpriority(os.PRIO_PROCESS, 0)
    assert facts.namespaces["mnt"] == os.readlink("/proc/self/ns/mnt")
    assert facts.cgroups == tuple(Path("/proc/self/cgroup").read_text().splitlines())
    assert facts.limits["NOFILE"][0] > 0
    assert procfs.nspid(os.getpid()) == os.getpid()


def test_a_pid_that_is_not_the_callers_any_more_is_refused(child: subprocess.Popen[bytes]) -> None:
    with pytest.raises(NotPermitted):
        procfs.caller_facts(child.pid, os.getuid() + 1, os.getgid())
    with pytest.raises(NotFound):
        procfs.caller_facts(0, os.getuid(), os.getgid())
