"""Processes, threads, loops and terminals."""

from __future__ import annotations

import asyncio
import concurrent.futures
import ctypes
import os
import resource
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Generator
from pathlib import Path

Creature = Generator[None, str, None]
PR_SET_NAME, PR_GET_NAME, PR_SET_PDEATHSIG, PR_GET_PDEATHSIG = 15, 16, 1, 2
libc = ctypes.CDLL(None, use_errno=True)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def a_child_that_answers(folder: Path) -> Creature:
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    assert child.stdin is not None
    assert child.stdout is not None
    while True:
        word = yield
        child.stdin.write(word.encode() + b"\n")
        assert child.stdout.readline() == word.encode() + b"\n"
        assert child.poll() is None


def a_grandchild_of_a_dead_child(folder: Path) -> Creature:
    file = folder / "grandchild"
    subprocess.run(["sh", "-c", f"setsid sleep 1000 >/dev/null 2>&1 & echo $! > {file}"], check=True)
    pid = int(file.read_text())
    while True:
        yield
        assert Path(f"/proc/{pid}/comm").read_text() == "sleep\n"
        assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1] == "1"


def a_zombie(folder: Path) -> Creature:
    pid = os.fork()
    if pid == 0:
        os._exit(7)
    while True:
        yield
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert found is not None
        assert (found.si_status, state_of(pid)) == (7, "Z")


def a_stopped_child(folder: Path) -> Creature:
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    assert child.stdin is not None
    assert child.stdout is not None
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    while True:
        yield
        assert state_of(child.pid) == "T"
        child.stdin.write(b"awake\n")
        assert not select.select([child.stdout], [], [], 0)[0]
        child.send_signal(signal.SIGCONT)
        assert child.stdout.readline() == b"awake\n"
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)


def threads_with_a_lock_and_local_values(folder: Path) -> Creature:
    asked, answered, stay = threading.Event(), threading.Event(), threading.Event()
    local, held, seen = threading.local(), threading.Lock(), list[tuple[int, object]]()

    def live() -> None:
        local.value = object()
        first = (threading.get_native_id(), local.value)
        held.acquire()
        answered.set()
        while not stay.is_set():
            asked.wait()
            asked.clear()
            seen.append((threading.get_native_id(), local.value))
            assert seen[-1] == first
            answered.set()

    threading.Thread(target=live, daemon=True).start()
    answered.wait()
    while True:
        yield
        answered.clear()
        asked.set()
        assert answered.wait(10)
        assert not held.acquire(blocking=False)
        assert len(set(seen)) == 1


def many_threads_and_their_stacks(folder: Path) -> Creature:
    goes = [threading.Event() for _ in range(40)]
    comes = [threading.Event() for _ in range(40)]

    def deep(number: int, depth: int) -> int:
        if depth:
            return deep(number, depth - 1) + 1
        while True:
            comes[number].set()
            goes[number].wait()
            goes[number].clear()

    for number in range(40):
        threading.Thread(target=deep, args=(number, number * 5), daemon=True).start()
    while True:
        for event in comes:
            assert event.wait(10)
            event.clear()
        yield
        for event in goes:
            event.set()


def a_thread_pool_with_work_in_it(folder: Path) -> Creature:
    pool = concurrent.futures.ThreadPoolExecutor(2)
    while True:
        gate = threading.Event()
        futures = [pool.submit(lambda number=number, gate=gate: gate.wait(30) and number) for number in range(6)]
        yield
        assert [future.done() for future in futures] == [False] * 6
        gate.set()
        assert [future.result(10) for future in futures] == [0, 1, 2, 3, 4, 5]


def an_event_loop_with_timers(folder: Path) -> Creature:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    async def a_little_later() -> int:
        before = ticks
        await asyncio.sleep(0.1)
        return ticks - before

    queue: asyncio.Queue[str] = asyncio.Queue()
    keep = asyncio.run_coroutine_threadsafe(tick(), loop)
    waiting = asyncio.run_coroutine_threadsafe(queue.get(), loop)
    while True:
        word = yield
        assert asyncio.run_coroutine_threadsafe(a_little_later(), loop).result(30) > 0
        assert not waiting.done()
        loop.call_soon_threadsafe(queue.put_nowait, word)
        assert waiting.result(10) == word
        waiting = asyncio.run_coroutine_threadsafe(queue.get(), loop)
        assert not keep.done()


def a_subprocess_of_an_event_loop(folder: Path) -> Creature:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    pipe = asyncio.subprocess.PIPE
    start = asyncio.create_subprocess_exec("cat", stdin=pipe, stdout=pipe)
    child = asyncio.run_coroutine_threadsafe(start, loop).result(10)
    assert child.stdin is not None
    assert child.stdout is not None
    while True:
        word = yield
        loop.call_soon_threadsafe(child.stdin.write, word.encode() + b"\n")
        line = asyncio.run_coroutine_threadsafe(child.stdout.readline(), loop).result(10)
        assert line.decode() == word + "\n"


def a_shell_on_a_terminal_of_the_sessions_own(folder: Path) -> Creature:
    master, slave = os.openpty()
    modes = termios.tcgetattr(slave)
    modes[3] &= ~termios.ECHO
    termios.tcsetattr(slave, termios.TCSANOW, modes)
    termios.tcsetwinsize(slave, (33, 99))
    environment = {**os.environ, "PS1": "", "PS2": ""}
    command = ["setsid", "--ctty", "bash", "--norc", "--noprofile", "--noediting", "-i"]
    shell = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment)
    os.write(master, b"kept=before; sleep 1000 & PS1=\n")
    seen = b""
    while True:
        word = yield
        os.write(master, f"jobs; stty size; tty; echo $kept-{word}-e''nd\n".encode())
        while f"before-{word}-end".encode() not in seen:
            assert select.select([master], [], [], 10)[0], seen
            seen += os.read(master, 65536)
        assert b"Running" in seen, seen
        assert b"33 99" in seen, seen
        assert os.ttyname(slave).encode() in seen, (os.ttyname(slave), seen)
        assert termios.tcgetattr(slave)[3] & termios.ECHO == 0
        assert shell.poll() is None
        os.write(master, b"sleep 2000\n")
        while os.tcgetpgrp(master) == shell.pid:  # what is typed before the job has the terminal may be lost
            time.sleep(0.01)
        os.write(master, b"\x03")
        seen = b""


def what_a_process_is(folder: Path) -> Creature:
    """A child with everything changed that a process can change about itself; it tells on request."""
    program = """
import ctypes, os, resource, signal, sys
libc = ctypes.CDLL(None)
os.setpgid(0, 0)
os.nice(5)
os.umask(0o027)
os.chdir('/usr')
os.sched_setaffinity(0, {0})
resource.setrlimit(resource.RLIMIT_NOFILE, (222, 333))
libc.prctl(15, b'a name', 0, 0, 0)
libc.prctl(1, signal.SIGUSR1, 0, 0, 0)
open('/proc/self/oom_score_adj', 'w').write('77')
got = []
signal.signal(signal.SIGUSR2, lambda *_: got.append(1))
signal.signal(signal.SIGHUP, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGRTMIN + 3})
os.kill(os.getpid(), signal.SIGUSR1)
libc.sigqueue(os.getpid(), signal.SIGRTMIN + 3, ctypes.c_void_p(4711))
def tell():
    name, death = ctypes.create_string_buffer(16), ctypes.c_int()
    libc.prctl(16, name, 0, 0, 0)
    libc.prctl(2, ctypes.byref(death), 0, 0, 0)
    mask = os.umask(0); os.umask(mask)
    before = len(got)
    os.kill(os.getpid(), signal.SIGUSR2)
    return [os.getpid(), os.getppid(), os.getpgrp(), os.getsid(0), os.getpriority(os.PRIO_PROCESS, 0), mask,
        os.getcwd(), sorted(os.sched_getaffinity(0)), resource.getrlimit(resource.RLIMIT_NOFILE), name.value,
        death.value, open('/proc/self/oom_score_adj').read(),
        signal.getsignal(signal.SIGHUP), len(got) - before, sorted(signal.sigpending()),
        sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), open('/proc/self/status').read().count('NoNewPrivs:\\t1'),
        os.environ['KEPT'], sys.argv, os.readlink('/proc/self/exe')]
while True:
    sys.stdin.readline()
    print(tell(), flush=True)
"""
    command = [sys.executable, "-c", program, "argument"]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env={**os.environ, "KEPT": "it"}
    )
    assert child.stdin is not None
    assert child.stdout is not None

    def ask() -> bytes:
        child.stdin.write(b"\n")
        return child.stdout.readline()

    first = ask()
    assert first
    while True:
        yield
        now = ask()
        assert now == first, f"{now!r}\n{first!r}"


def limits_of_the_keeper_itself(folder: Path) -> Creature:
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    first = {name: resource.getrlimit(getattr(resource, name)) for name in names}
    environment = dict(os.environ)
    while True:
        yield
        assert {name: resource.getrlimit(getattr(resource, name)) for name in names} == first
        assert dict(os.environ) == environment
        assert os.getpid() != 1
        assert Path("/proc/1/comm").read_text() == "torpor-init\n"
