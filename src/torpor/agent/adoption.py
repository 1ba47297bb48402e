"""Making a session of a tree that runs already: first everything that stands against it, then a record of it.

Nothing of the tree is touched: it runs on where it was started until its first hibernation, and comes back from that
in namespaces of its own.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shlex
import time
from typing import Any

import msgspec

from torpor.agent.lifecycle import PRESENT, slug, user_name
from torpor.agent.node import Node
from torpor.agent.running import is_alive
from torpor.engine import preflight, procfs
from torpor.errors import Conflict, NotFound, NotPermitted, PreflightRefused, TorporError, UsageError
from torpor.model import Caller, Launch, ProcessId, Session, State

KEPT_FILES = ("exit", "out.log")  # what the keeper looks for in a session's folder


class Found(msgspec.Struct):
    """What `pid` and everything below it are, and one sentence for each thing that stands against adopting them."""

    pid: int
    argv: list[str]
    cwd: str
    uid: int
    owner: str
    pids: list[int]
    rss_bytes: int
    objections: list[str]


async def look(node: Node, pid: int, *, asking: tuple[int, int]) -> Found:
    """Looks only. `asking` are pid and uid of whoever asks. Raises NotFound, NotPermitted, UsageError or Conflict."""
    process = _identified(pid)
    _check_owner(pid, asking[1])
    tree = procfs.tree(pid)
    if not tree or not procfs.program(pid):
        raise UsageError(f"Process {pid} is not a program: it has ended, or belongs to the kernel.")
    _refuse_sessions(node, tree, asking[1])
    _refuse_own(node, tree, asking[0])
    objections = await asyncio.to_thread(preflight.objections, pid, around=procfs.namespaces(node.pid))
    cwd = os.readlink(f"/proc/{pid}/cwd")
    if not os.path.isdir(cwd):
        objections.append(f"Its working directory {cwd} does not exist any more, and it could not come back there.")
    if not is_alive(process):
        raise NotFound(f"Process {pid} has just ended.")
    uid = procfs.uid(pid)
    argv = [_text(argument) for argument in procfs.arguments(pid) or [procfs.name(pid)]]
    return Found(pid, argv, _text(cwd), uid, user_name(uid), tree, procfs.rss_bytes(tree), objections)


async def adopt(node: Node, pid: int, *, asking: tuple[int, int], name: str | None, **facts: Any) -> Session:
    """Makes it a session; `facts` are labels and idle_after. Raises what `look` raises, and PreflightRefused."""
    process = _identified(pid)
    found = await look(node, pid, asking=asking)
    if found.objections:
        raise PreflightRefused(
            f"Process {pid} ({shlex.join(found.argv)}) cannot be adopted. " + " ".join(found.objections),
            safe="Nothing was touched; it goes on running.",
            hint=f"When it is changed, look again with: torpor adopt {pid} --dry-run",
        )
    caller: Caller = procfs.caller_facts(pid, found.uid, procfs.gid(pid))
    session_id = secrets.token_hex(6)
    launch = Launch(tuple(found.argv), found.cwd, {_text(k): _text(v) for k, v in procfs.environment(pid).items()})
    if not is_alive(process):
        raise NotFound(f"Process {pid} has just ended.")
    node.registry.create_session(
        Session(
            id=session_id,
            name=name or f"{slug(found.argv[0])}-{session_id[:4]}",
            state=State.RUNNING,
            uid=found.uid,
            owner=found.owner,
            node=node.name,
            created=time.time(),
            launch=launch,
            caller=caller,
            init=process,
            outside=True,
            **facts,
        )
    )
    try:
        _make_folder(node, session_id, found.uid)
        await node.keeper.adopt(session_id, process)
    except (TorporError, OSError):
        node.registry.delete_session(session_id)
        raise
    node.board.active(session_id, time.time())
    node.lifecycle.settle(session_id)
    return node.registry.session(session_id)


def _identified(pid: int) -> ProcessId:
    if pid <= 1:
        raise UsageError(f"Process {pid} cannot be adopted.", hint="Name the process that your program started with.")
    return ProcessId(*procfs.identify(pid), procfs.boot_id())


def _check_owner(pid: int, uid: int) -> None:
    owners = set(procfs.uids(pid))
    if uid != 0 and owners != {uid}:
        raise NotPermitted(f"Process {pid} is not yours.", safe="Nothing was touched.")


def _refuse_sessions(node: Node, tree: list[int], uid: int) -> None:
    for session in node.registry.sessions():
        if session.state not in PRESENT or session.init is None or not is_alive(session.init):
            continue
        members = set(procfs.tree(session.init.pid))
        name = session.name if uid in (0, session.uid) else "of another user"
        if tree[0] in members:
            raise Conflict(
                f"Process {tree[0]} belongs to the session {name} already.",
                safe="Nothing was changed.",
                hint=f"Look at it with: torpor show {name}",
            )
        if members & set(tree):
            raise Conflict(
                f"Process {tree[0]} has the session {name} among its descendants.",
                safe="Nothing was changed.",
                hint="End that session first, or adopt a smaller tree.",
            )


def _refuse_own(node: Node, tree: list[int], asking: int) -> None:
    own = {node.pid: "Torpor's agent", node.keeper.pid: "Torpor's keeper", asking: "the command that asks for this"}
    for pid, what in own.items():
        if pid in tree:
            raise Conflict(
                f"Process {tree[0]} cannot be adopted: {what} ({pid}) runs below it.",
                safe="Nothing was changed.",
                hint="Ask from another terminal, about a process that has nothing of Torpor below it.",
            )


def _make_folder(node: Node, session_id: str, uid: int) -> None:
    folder = node.paths.session(session_id)
    folder.mkdir(mode=0o711)
    folder.chmod(0o711)
    for name in KEPT_FILES:
        opened = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.fchown(opened, uid, -1)
        os.close(opened)


def _text(raw: str) -> str:
    """What the record may hold: bytes that are no text are replaced."""
    return raw.encode(errors="surrogateescape").decode(errors="replace")
