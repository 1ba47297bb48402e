"""First process of every session: starts the main command, reaps everything, forwards signals, keeps the exit status.

A script of its own, run as `python3 -I -S` from a memory file and therefore without a single import from
Torpor: it is saved inside every checkpoint, so it stays small, and an upgrade of Torpor never changes one that runs.

Arguments: SPEC_FD EXIT_FD READY_FD; the script itself is /proc/self/fd/N. The spec is NUL-separated: `terminal` or
nothing, the number of arguments, the arguments, the environment. The working directory is inherited.

For a tree that is restored into this session and was not started here, the spec is `adopt`, 1, and the pid that its
first process will have; standard input says when to go on: its end means that the tree will not come.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
import termios

FORWARDED = {
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGWINCH,
    signal.SIGCONT,
}
NOT_FOUND = 127
NOT_EXECUTABLE = 126


def main() -> None:
    """Run one session to its end and exit with its main command's status (128 + signal when it was killed)."""
    source_fd = int(sys.argv[0].rpartition("/")[2])
    spec_fd, exit_fd, ready_fd = (int(argument) for argument in sys.argv[1:4])
    os.close(source_fd)
    for fd in (exit_fd, ready_fd):
        os.set_inheritable(fd, False)
    mode, argv, env = _read_spec(spec_fd)
    _name_this_process()
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED | {signal.SIGCHLD})
    if mode == b"adopt":
        command = _await(int(argv[0]), ready_fd)
    else:
        command = _start_or_say_why_not(argv, env, mode == b"terminal", ready_fd)
    _let_go_of_standard_streams()
    os.chdir("/")
    os.write(ready_fd, b'{"ready": true}\n')
    os.close(ready_fd)
    status = _serve_until_exit(command)
    with contextlib.suppress(OSError):  # a full disk, a file size limit: our own exit still tells the status
        os.ftruncate(exit_fd, 0)
        os.write(exit_fd, b"%d" % status)
    os._exit(status)


def _read_spec(fd: int) -> tuple[bytes, list[bytes], dict[bytes, bytes]]:
    with os.fdopen(fd, "rb") as file:
        fields = file.read().split(b"\0")
    end = 2 + int(fields[1])
    pairs = (field.partition(b"=") for field in fields[end:])
    return fields[0], fields[2:end], {name: value for name, _, value in pairs if name}


def _name_this_process() -> None:
    with open("/proc/self/comm", "w") as file:
        file.write("torpor-init")


def _await(command: int, ready_fd: int) -> int:
    os.write(ready_fd, b'{"ready": true}\n')
    if not os.read(0, 1):
        os._exit(NOT_EXECUTABLE)
    return command


def _start_or_say_why_not(argv: list[bytes], env: dict[bytes, bytes], terminal: bool, ready_fd: int) -> int:
    try:
        return _start(argv, env, terminal)
    except OSError as error:
        os.write(
            ready_fd,
            b'{"error": "The session cannot start its command: %s."}\n' % os.strerror(error.errno or 0).encode(),
        )
        os._exit(NOT_EXECUTABLE)


def _start(argv: list[bytes], env: dict[bytes, bytes], terminal: bool) -> int:
    command = os.fork()
    if command == 0:
        try:
            _become_leader(terminal)
            _restore_signals()
            _execute(argv, env)
        finally:
            os._exit(NOT_EXECUTABLE)
    if not terminal:
        with contextlib.suppress(OSError):  # it may have done this itself and called exec, or have ended
            os.setpgid(command, command)  # here too: a signal may have to be forwarded before the child ran
    return command


def _become_leader(terminal: bool) -> None:
    if terminal:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    else:
        os.setpgid(0, 0)


def _restore_signals() -> None:
    """Nothing that Python, the keeper or a shell above it chose to ignore is ignored in the session."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())


def _execute(argv: list[bytes], env: dict[bytes, bytes]) -> None:
    """Replace this process as a shell would: PATH of the session, 127 for not found, 126 for not executable."""
    failure: OSError = FileNotFoundError(2, "command not found")
    for path in _candidates(argv[0], env.get(b"PATH", os.fsencode(os.defpath))):
        try:
            os.execve(path, argv, env)
        except (FileNotFoundError, NotADirectoryError) as error:
            if path == argv[0]:
                failure = error
        except OSError as error:
            if path == argv[0] or os.path.exists(path):  # else a folder of PATH that is closed to this user
                failure = error
    os.write(2, b"torpor: %s: %s\n" % (argv[0], (failure.strerror or "cannot be executed").encode()))
    os._exit(NOT_FOUND if isinstance(failure, (FileNotFoundError, NotADirectoryError)) else NOT_EXECUTABLE)


def _candidates(name: bytes, path: bytes) -> list[bytes]:
    if b"/" in name:
        return [name]
    return [(folder or b".") + b"/" + name for folder in path.split(b":")]


def _let_go_of_standard_streams() -> None:
    """The command alone holds the terminal or the pipe, so that its readers and writers see it go."""
    nothing = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    os.close(nothing)


def _serve_until_exit(command: int) -> int:
    """Reap and forward until the command has ended; signals stay blocked, so none is lost and none interrupts."""
    while True:
        status = _reap(command)
        if status is not None:
            return status
        number = signal.sigwaitinfo(FORWARDED | {signal.SIGCHLD}).si_signo
        if number != signal.SIGCHLD:
            _forward(command, number)


def _reap(command: int) -> int | None:
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == command:
            code = os.waitstatus_to_exitcode(status)
            found = code if code >= 0 else 128 - code


def _forward(command: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended; the next turn reaps it
        os.killpg(command, number)


if __name__ == "__main__":
    main()
