"""Remembers what every byte of its memory must be, and does everything to it that a process can do to memory.

Arguments: a folder. It prints `ready`, waits for the file `go` there, does one thing after another and prints a line
for each, then checks every byte whenever there is a new file `check-N`, and prints `checked N True` or what is wrong.
"""

import ctypes
import os
import random
import sys
import threading
import time

PAGE = 4096
SIZE = 2 << 20
MAYMOVE, FIXED, DONTUNMAP = 1, 2, 4
DONTNEED, FREE, HUGEPAGE, WIPEONFORK = 4, 8, 14, 18
READ, WRITE = 1, 2

libc = ctypes.CDLL(None, use_errno=True)
for name in ("mmap", "mremap"):
    getattr(libc, name).restype = ctypes.c_void_p
folder = sys.argv[1]
with open("/proc/self/cmdline", "rb") as file:
    arguments = file.read()
with open("/proc/self/environ", "rb") as file:
    environment = file.read()
areas = {}  # name -> [(address, bytes, seed or None for zeros)], what is there


def number(value):
    return ctypes.c_ulong(value)


def mapped(size, protection=READ | WRITE, at=0, flags=0x22):
    address = libc.mmap(number(at), number(size), protection, flags | (0x10 if at else 0), -1, number(0))
    assert address != 2**64 - 1, ctypes.get_errno()
    return address


def done(status):
    assert status == 0, (status, ctypes.get_errno())


def random_bytes(seed, size):
    return random.Random(seed).randbytes(size)


def fill(address, size, seed):
    ctypes.memmove(address, random_bytes(seed, SIZE), size)


def new(name, seed, size=SIZE):
    address = mapped(SIZE + (64 << 10)) if size == SIZE else mapped(size)
    done(libc.munmap(number(address + SIZE), number(64 << 10))) if size == SIZE else None  # a gap: areas stay apart
    fill(address, size, seed)
    areas[name] = [(address, 0, size, seed)]
    return address


def new_special(name, seed, protection=READ | WRITE, flags=0x22, advice=None, locked=False):
    """An area in the middle of a larger mapping, aligned to what a huge page is."""
    around = mapped(3 * SIZE, flags=flags)
    address = (around + SIZE) // SIZE * SIZE
    if advice is not None:
        done(libc.madvise(number(around), number(3 * SIZE), advice))
    fill(address, SIZE, seed)
    if locked:
        done(libc.mlock(number(address), number(SIZE)))
    done(libc.mprotect(number(address), number(SIZE), protection))
    areas[name] = [(address, 0, SIZE, seed)]
    return address


def cut(name, start, end, seed):
    """From now on the addresses from `start` to `end` hold zeros (seed 0) or are no part of the area (None)."""
    parts = []
    for address, offset, size, old in areas[name]:
        for begin, stop, what in ((address, start, old), (start, end, seed), (end, address + size, old)):
            begin, stop = max(begin, address), min(stop, address + size)
            if begin < stop and what is not None:
                parts.append((begin, offset + begin - address, stop - begin, what))
    areas[name] = parts


def wrong(names=None):
    """What is not as it must be: every byte of every area is looked at."""
    found = []
    for name, parts in areas.items():
        if names is not None and name not in names:
            continue
        for address, offset, size, seed in parts:
            here = ctypes.string_at(address, size)
            must = random_bytes(seed, SIZE)[offset : offset + size] if seed else bytes(size)
            if here != must:
                bad = [page for page in range(0, size, PAGE) if here[page : page + PAGE] != must[page : page + PAGE]]
                zeros = sum(not any(here[page : page + PAGE]) for page in bad)
                found.append((name, hex(address), len(bad), zeros, bad[:3]))
    return found


def say(*words):
    print(*words, flush=True)


def show_arguments():
    """The kernel reads these from the process's memory, and cannot wait there."""
    for shown, must in (("cmdline", arguments), ("environ", environment)):
        with open(f"/proc/self/{shown}", "rb") as file:
            assert file.read() == must, shown


def threads_touch():
    address = areas["threads"][0][0]
    must = random_bytes(areas["threads"][0][3], SIZE)
    bad = []

    def touch(seed):
        chosen = random.Random(seed)
        for _ in range(150):
            page = chosen.randrange(SIZE // PAGE) * PAGE
            if ctypes.string_at(address + page, PAGE) != must[page : page + PAGE]:
                bad.append(page)

    touching = [threading.Thread(target=touch, args=(seed,)) for seed in range(4)]
    for one in touching:
        one.start()
    for one in touching:
        one.join()
    assert not bad, bad


def fork_while_waiting():
    child = os.fork()
    if child == 0:
        bad = wrong(("forked", "forked-too"))
        wiped = ctypes.string_at(areas["wiped"][0][0], SIZE)
        os._exit(0 if not bad and not any(wiped) else 1)
    bad = wrong(("forked",))
    _, status = os.waitpid(child, 0)
    assert (bad, status) == ([], 0), (bad, status)


def fork_and_write():
    address = areas["forked-too"][0][0]
    child = os.fork()
    if child == 0:
        ctypes.memset(address, 7, SIZE // 2)
        child_of_child = os.fork()
        if child_of_child == 0:
            rest = (
                ctypes.string_at(address + SIZE // 2, SIZE // 2)
                == random_bytes(areas["forked-too"][0][3], SIZE)[SIZE // 2 :]
            )
            os._exit(0 if rest and ctypes.string_at(address, SIZE // 2) == b"\7" * (SIZE // 2) else 1)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child_of_child, 0)[1]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def move():
    for name in ("moved", "moved-touched"):
        address, _, size, seed = areas[name][0]
        if name == "moved-touched":
            ctypes.string_at(address + size // 4, size // 4)
        target = mapped(size)
        assert libc.mremap(number(address), number(size), number(size), MAYMOVE | FIXED, number(target)) == target
        areas[name] = [(target, 0, size, seed)]
    address, _, size, seed = areas["moved-part"][0]
    target = mapped(size // 2)
    part = address + size // 4
    assert libc.mremap(number(part), number(size // 2), number(size // 2), MAYMOVE | FIXED, number(target)) == target
    areas["moved-part"] = [
        (address, 0, size // 4, seed),
        (target, size // 4, size // 2, seed),
        (part + size // 2, size // 4 * 3, size // 4, seed),
    ]
    address, _, size, seed = areas["grown"][0]
    larger = libc.mremap(number(address), number(size), number(size * 2), MAYMOVE, number(0))
    areas["grown"] = [(larger, 0, size, seed), (larger + size, 0, size, 0)]
    address, _, size, seed = areas["left"][0]
    target = libc.mremap(number(address), number(size), number(size), MAYMOVE | DONTUNMAP, number(0))
    areas["left"] = [(target, 0, size, seed), (address, 0, size, 0)]


def unmap():
    address, _, size, _ = areas["unmapped"][0]
    middle = (address + size // 4, address + size // 2)
    done(libc.munmap(number(middle[0]), number(middle[1] - middle[0])))
    cut("unmapped", *middle, None)
    again = mapped(middle[1] - middle[0], at=middle[0])
    areas["mapped-again"] = [(again, 0, middle[1] - middle[0], 0)]
    address, _, size, _ = areas["overmapped"][0]
    mapped(size // 2, at=address)
    cut("overmapped", address, address + size // 2, 0)


def throw_away():
    for name in ("thrown", "thrown-touched"):
        address, _, size, _ = areas[name][0]
        if name == "thrown-touched":
            ctypes.string_at(address, size)
        start, end = address + 37 * PAGE, address + size // 2 + 5 * PAGE
        done(libc.madvise(number(start), number(end - start), DONTNEED))
        cut(name, start, end, 0)


def free():
    """Freed pages may keep what they held until they are written; what is written stays."""
    for name in ("freed", "freed-touched"):
        address, _, size, seed = areas[name][0]
        must = random_bytes(seed, SIZE)
        if name == "freed-touched":
            ctypes.string_at(address, size)
        half = size // 2
        done(libc.madvise(number(address), number(half), FREE))
        for page in range(0, half, PAGE):
            here = ctypes.string_at(address + page, PAGE)
            assert here == must[page : page + PAGE] or not any(here), page
        fill(address, half, seed + 1)
        areas[name] = [(address, 0, half, seed + 1), (address + half, half, size - half, seed)]


def protect():
    address, _, size, _ = areas["protected"][0]
    for page in range(3, 220, 7):
        done(libc.mprotect(number(address + page * PAGE), number(2 * PAGE), READ))
    done(libc.mprotect(number(address + size // 2), number(size // 4), 0))


def unprotect():
    address, _, size, _ = areas["protected"][0]
    done(libc.mprotect(number(address + size // 2), number(size // 4), READ))


def use_huge():
    address, _, size, seed = areas["huge-thrown"][0]
    done(libc.madvise(number(address + size // 4), number(size // 2), DONTNEED))
    cut("huge-thrown", address + size // 4, address + size // 4 * 3, 0)
    address, _, size, seed = areas["huge-moved"][0]
    target = mapped(2 * size) // size * size + size
    assert libc.mremap(number(address), number(size), number(size), MAYMOVE | FIXED, number(target)) == target
    areas["huge-moved"] = [(target, 0, size, seed)]
    child = os.fork()
    if child == 0:
        os._exit(0 if not wrong(("huge", "huge-moved")) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def let_the_kernel_touch():
    """System calls read from and write to memory that nobody has touched; another process looks at it, too."""
    address, _, size, seed = areas["kernel"][0]
    view = (ctypes.c_char * size).from_address(address)
    reading, writing = os.pipe()
    for page in range(0, size // 2, 5 * PAGE):
        piece = memoryview(view)[page + 100 : page + 100 + PAGE]
        os.write(writing, piece)
        assert os.read(reading, PAGE) == random_bytes(seed, SIZE)[page + 100 : page + 100 + PAGE], page
    os.write(writing, random_bytes(seed + 1, SIZE)[size // 2 : size // 2 + 3 * PAGE])
    assert os.readv(reading, [memoryview(view)[size // 2 : size // 2 + 3 * PAGE]]) == 3 * PAGE
    areas["kernel"] = [
        (address, 0, size // 2, seed),
        (address + size // 2, size // 2, 3 * PAGE, seed + 1),
        (address + size // 2 + 3 * PAGE, size // 2 + 3 * PAGE, size // 2 - 3 * PAGE, seed),
    ]
    address, _, size, seed = areas["looked-at"][0]
    must, here = random_bytes(seed, SIZE), os.getpid()
    looking = os.fork()
    if looking == 0:
        found = ctypes.create_string_buffer(size)
        ours = (ctypes.c_ulong * 2)(ctypes.addressof(found), size)
        theirs = (ctypes.c_ulong * 2)(address, size)
        read = libc.process_vm_readv(here, ours, number(1), theirs, number(1), number(0))
        os._exit(0 if (read, found.raw) == (size, must) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(looking, 0)[1]) == 0
    assert os.waitstatus_to_exitcode(os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)[1]) == 0


def child_ends(how):
    _, status = os.waitpid(children.pop(how), 0)
    assert os.waitstatus_to_exitcode(status) == {"exit": 7, "exec": 0}[how], (how, status)


def child(how):
    """A child with memory of its own that ends, or executes another program, while that memory is awaited."""
    pid = os.fork()
    if pid:
        return pid
    address = mapped(SIZE)
    fill(address, SIZE, 99)
    while not os.path.exists(f"{folder}/go"):
        time.sleep(0.02)
    if ctypes.string_at(address + SIZE // 2, PAGE) != random_bytes(99, SIZE)[SIZE // 2 : SIZE // 2 + PAGE]:
        os._exit(1)
    if how == "exec":
        os.execv("/bin/true", ["true"])
    os._exit(7 if not wrong() else 2)


new("inherited", 98)
children = {how: child(how) for how in ("exit", "exec")}  # before there is memory that they would share
names = "threads forked forked-too wiped moved moved-touched moved-part grown left unmapped overmapped thrown"
for seed, area in enumerate((names + " thrown-touched freed freed-touched protected untouched").split(), start=1):
    new(area, seed)
for seed, area in enumerate(("huge", "huge-thrown", "huge-moved"), start=40):
    new_special(area, seed, advice=HUGEPAGE)
new_special("locked", 50, locked=True)
new_special("shared", 51, flags=0x21)
new_special("read-only", 52, protection=READ)
new_special("closed", 53, protection=0)
new("kernel", 54)
new("looked-at", 55)
done(libc.madvise(number(areas["wiped"][0][0]), number(SIZE), WIPEONFORK))
say("ready")
while not os.path.exists(f"{folder}/go"):
    time.sleep(0.02)
done(libc.mprotect(number(areas["closed"][0][0]), number(SIZE), READ))
steps = (show_arguments, threads_touch, fork_while_waiting, fork_and_write, move, unmap, throw_away, free, protect)
for step in (*steps, use_huge, let_the_kernel_touch):
    step()
    say("did", step.__name__)
child_ends("exit")
child_ends("exec")
unprotect()
say("did", "everything")
turn = 0
while True:
    while not os.path.exists(f"{folder}/check-{turn}"):
        time.sleep(0.02)
    if turn == 0:
        half = [name for number, name in enumerate(areas) if number % 2]
        say("checked", turn, wrong(half) or True)
    else:
        say("checked", turn, wrong() or True)
    turn += 1
