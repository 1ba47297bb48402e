"""Run by CRIU at the points where Torpor decides: asks the worker over a socket and exits with its answer.

When the worker is dead the connection fails or ends, the exit status is not zero, and CRIU undoes what it
did: a frozen session goes on running, a half-restored one is ended. Standard library only; run as a file.
"""

import os
import socket
import sys

NO_ANSWER = 90


def main() -> int:
    """Exit status for CRIU: 0 go on, anything else undo."""
    action = os.environ["CRTOOLS_SCRIPT_ACTION"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as worker:
        worker.connect(os.path.join(os.path.dirname(os.path.abspath(__file__)), "hook.sock"))
        worker.send(f"{action} {os.environ.get('CRTOOLS_INIT_PID', '0')}".encode())
        return int(worker.recv(16) or NO_ANSWER)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except OSError:
        sys.exit(NO_ANSWER)
