"""Timers, and the descriptors that wait for things."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import struct
import threading
import time
from collections.abc import Generator
from pathlib import Path

Creature = Generator[None, str, None]
libc = ctypes.CDLL(None, use_errno=True)


def _timerfd(first: float, interval: float) -> int:
    timer = libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK)
    parts = [int(interval), int(interval % 1 * 1e9), int(first), int(first % 1 * 1e9)]
    assert libc.timerfd_settime(timer, 0, struct.pack("llll", *parts), None) == 0
    return timer


def timer_descriptors(folder: Path) -> Creature:
    ticking, distant = _timerfd(0.01, 0.01), _timerfd(100_000.5, 0)
    while True:
        yield
        assert select.select([ticking], [], [], 10)[0]
        assert struct.unpack("Q", os.read(ticking, 8))[0] > 0
        assert not select.select([distant], [], [], 0)[0]
        left = ctypes.create_string_buffer(32)
        assert libc.timerfd_gettime(distant, left) == 0
        assert 90_000 < struct.unpack("llll", left.raw)[2] <= 100_000


def event_descriptors(folder: Path) -> Creature:
    counter, empty = os.eventfd(41), os.eventfd(0, os.EFD_NONBLOCK)
    while True:
        yield
        assert os.eventfd_read(counter) == 41
        assert not select.select([empty], [], [], 0)[0]
        os.eventfd_write(counter, 41)


def a_signal_descriptor(folder: Path) -> Creature:
    wanted = {signal.SIGRTMIN + 5}
    signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
    mask = struct.pack("Q", 1 << (signal.SIGRTMIN + 5 - 1))
    opened = libc.signalfd(-1, mask, os.O_NONBLOCK)
    assert opened >= 0
    while True:
        signal.pthread_kill(threading.get_ident(), signal.SIGRTMIN + 5)
        yield
        assert struct.unpack_from("I", os.read(opened, 128))[0] == signal.SIGRTMIN + 5


def an_epoll_set(folder: Path) -> Creature:
    reading, writing = os.pipe()
    other, _ = os.pipe()
    counter = os.eventfd(0)
    epoll = select.epoll()
    epoll.register(reading, select.EPOLLIN | select.EPOLLET)
    epoll.register(counter, select.EPOLLIN)
    epoll.register(other, select.EPOLLIN)
    while True:
        yield
        assert epoll.poll(0) == []
        os.write(writing, b"x")
        os.eventfd_write(counter, 1)
        found = epoll.poll(10)
        assert dict(found) == {reading: select.EPOLLIN, counter: select.EPOLLIN}
        os.read(reading, 10)
        os.eventfd_read(counter)


def a_posix_timer(folder: Path) -> Creature:
    fired = 0

    def count(*_: object) -> None:
        nonlocal fired
        fired += 1

    signal.signal(signal.SIGRTMIN + 6, count)
    event = struct.pack("qii48x", 0, signal.SIGRTMIN + 6, 0)
    timer, distant = ctypes.c_void_p(), ctypes.c_void_p()
    assert libc.timer_create(time.CLOCK_MONOTONIC, event, ctypes.byref(timer)) == 0
    assert libc.timer_create(time.CLOCK_MONOTONIC, event, ctypes.byref(distant)) == 0
    assert libc.timer_settime(timer, 0, struct.pack("llll", 0, 20_000_000, 0, 20_000_000), None) == 0
    assert libc.timer_settime(distant, 0, struct.pack("llll", 0, 0, 100_000, 0), None) == 0
    while True:
        yield
        before, deadline = fired, time.monotonic() + 10
        while fired == before:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        left = ctypes.create_string_buffer(32)
        assert libc.timer_gettime(distant, left) == 0
        assert 90_000 < struct.unpack("llll", left.raw)[2] <= 100_000


def interval_timers(folder: Path) -> Creature:
    fired = 0

    def count(*_: object) -> None:
        nonlocal fired
        fired += 1

    signal.signal(signal.SIGALRM, count)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    signal.setitimer(signal.ITIMER_PROF, 10_000, 20_000)
    while True:
        yield
        before, deadline = fired, time.monotonic() + 10
        while fired == before:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        left, interval = signal.getitimer(signal.ITIMER_PROF)
        assert 9_000 < left <= 10_000
        assert interval == 20_000
