"""Calls that a thread waited in when it was frozen, and that it goes on waiting in when it comes back.

The kernel takes a waiting thread out of its call to freeze it. CRIU has most calls made again, but those that the
kernel would have gone on with by itself it lets fail as interrupted, and so do those that the kernel always lets fail
then. No signal came, so a program need not expect that, and some end. What waits without a limit, or up to a point in
time, can be made again exactly; where there is a time limit, the program is told. Layouts of `images/core.proto` and
`images/core-x86.proto` (MIT).
"""

from __future__ import annotations

from torpor.engine.protobuf import Field, entries_of, entry, fields_of, packed

MACHINE, X86_64 = 1, 1  # of an entry of core-ID.img; below are further fields of it
X86, TASK, THREAD = 2, 3, 5
REGISTERS = 2  # field of X86
SHARED_SIGNALS, OWN_SIGNALS = 10, 9  # fields of TASK and THREAD: signals on their way
ARGUMENTS = (15, 14, 13, 8)  # fields of REGISTERS: rdi, rsi, rdx, r10
RESULT, CALL, NEXT, SEGMENT = 11, 16, 17, 18  # rax, its value before the call, rip, cs
IN_64_BIT = 0x33
INTERRUPTED = (1 << 64) - 4  # -EINTR
LENGTH = 2  # bytes of the instruction that makes a call
POLL, FUTEX, EPOLL_WAIT, EPOLL_PWAIT, EPOLL_PWAIT2 = 7, 202, 232, 281, 441
FUTEX_COMMAND, FUTEX_WAIT_BITSET = 0x7F, 9  # its time limit is a point in time


def made_again(core: bytes) -> bytes:
    """A core image whose thread makes the call again that it waited in, where that is exact."""
    return core[:8] + b"".join(entry(_thread(body)) for body in entries_of(core))


def _thread(body: bytes) -> bytes:
    fields = list(fields_of(body))
    facts = dict(fields)
    if facts.get(MACHINE) != X86_64 or _has(facts.get(TASK), SHARED_SIGNALS) or _has(facts.get(THREAD), OWN_SIGNALS):
        return body
    return packed((number, _x86(value) if number == X86 else value) for number, value in fields)


def _has(message: Field | None, signals: int) -> bool:
    return isinstance(message, bytes) and bool(dict(fields_of(message)).get(signals))


def _x86(value: Field) -> Field:
    assert isinstance(value, bytes)
    return packed((number, _registers(inner) if number == REGISTERS else inner) for number, inner in fields_of(value))


def _registers(value: Field) -> Field:
    assert isinstance(value, bytes)
    fields = [(number, register) for number, register in fields_of(value) if isinstance(register, int)]
    registers = dict(fields)
    if registers[RESULT] != INTERRUPTED or registers[SEGMENT] != IN_64_BIT or not _is_exact(registers):
        return value
    changed = {RESULT: registers[CALL], NEXT: registers[NEXT] - LENGTH}
    return packed((number, changed.get(number, register)) for number, register in fields)


def _is_exact(registers: dict[int, int]) -> bool:
    _, second, third, fourth = (registers[number] for number in ARGUMENTS)
    call = registers[CALL]
    if call == POLL:
        return _is_negative(third)
    if call in (EPOLL_WAIT, EPOLL_PWAIT):
        return _is_negative(fourth)
    if call == EPOLL_PWAIT2:
        return fourth == 0
    return call == FUTEX and second & FUTEX_COMMAND == FUTEX_WAIT_BITSET


def _is_negative(number: int) -> bool:
    """As an int of 32 bits."""
    return bool(number & 0x80000000)
