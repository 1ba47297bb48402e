"""The agent's process: from its folders to a clean end."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import resource
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from torpor import logs
from torpor.agent import folders
from torpor.agent.node import Node
from torpor.agent.reconcile import reconcile
from torpor.api.app import application
from torpor.api.peer import PeerProtocol
from torpor.errors import Conflict, NotPermitted, SetupError
from torpor.paths import Paths, from_environment

logger = logging.getLogger(__name__)

SOCKET_MODE = 0o666  # anyone may ask; everyone is identified
SOCKET_PATH_LIMIT = 107  # bytes
BACKLOG = 256
THREADS = 64  # for what blocks: each user has only a few of them at once
GOODBYE = 2  # seconds that answers in progress get at the end


def serve(log_level: str) -> int:
    """Runs the agent until SIGTERM or SIGINT; gives the exit status.

    Raises NotPermitted when not root, Conflict when an agent runs here already, and what opening its files raises.
    """
    if os.geteuid() != 0:
        raise NotPermitted(
            "The agent starts sessions for every user, and needs root for that.", hint="Run it with sudo."
        )
    logs.configure(log_level)
    paths = from_environment()
    os.umask(0o077)
    folders.prepare(paths)
    folders.site_key(paths)
    _allow_many_connections()
    with _only_agent(paths), _listener(paths.agent_socket) as listener:
        asyncio.run(_serve(paths, listener))
    return 0


async def _serve(paths: Paths, listener: socket.socket) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS, thread_name_prefix="torpor"))
    node = Node(paths)
    await node.start()
    await reconcile(node)
    timer = asyncio.create_task(node.timer.run())
    timer.add_done_callback(_timer_ended)
    server = _Server(
        uvicorn.Config(
            application(node),
            http=PeerProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            backlog=BACKLOG,
            timeout_graceful_shutdown=GOODBYE,
            server_header=False,
        )
    )
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, _stop, node, server)
    logger.info("Ready on %s", paths.agent_socket)
    await server.serve(sockets=[listener])
    timer.cancel()
    await node.stop()
    logger.info("Ended; sessions and operations go on")


class _Server(uvicorn.Server):
    """Leaves the signals to the agent."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _stop(node: Node, server: uvicorn.Server) -> None:
    server.should_exit = True
    node.close()


def _timer_ended(timer: asyncio.Task[None]) -> None:
    if not timer.cancelled() and timer.exception() is not None:
        logger.critical("The idle timer failed; the agent ends", exc_info=timer.exception())
        os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def _only_agent(paths: Paths) -> Iterator[None]:
    """Holds the lock that a second agent on the same folders would need; the kernel lets it go with the process."""
    descriptor = os.open(paths.run / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise Conflict(
            f"An agent serves {paths.agent_socket} already.",
            hint="Stop it first, or give this one other folders with TORPOR_HOME.",
        ) from error
    try:
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _listener(path: Path) -> Iterator[socket.socket]:
    """The listening socket, put in the place of a dead agent's at once: callers see the old one or the new one."""
    draft = path.with_name(f".{path.name}.new")
    if len(os.fsencode(draft)) > SOCKET_PATH_LIMIT:
        raise SetupError(f"The path {path} is too long for a socket.", hint="Choose a shorter TORPOR_HOME.")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    draft.unlink(missing_ok=True)
    listener.bind(str(draft))
    draft.chmod(SOCKET_MODE)
    listener.listen(BACKLOG)
    draft.rename(path)
    try:
        yield listener
    finally:
        path.unlink(missing_ok=True)
        listener.close()


def _allow_many_connections() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
