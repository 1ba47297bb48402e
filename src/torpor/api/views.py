"""Sessions and checkpoints as the API shows them."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from torpor.agent.node import Node
from torpor.agent.running import is_alive
from torpor.durations import spoken_duration
from torpor.engine import procfs
from torpor.model import Checkpoint, OperationKind, Session, State


def session_view(node: Node, session: Session, *, full: bool = False, whole: bool = True) -> dict[str, Any]:
    """All of a session's record, and what is seen of it now; `full`: its checkpoints whole instead of their ids.

    Not `whole`, for who does not own it: without its environment, which may hold secrets.
    """
    board = node.board
    session = msgspec.structs.replace(session, kernel=board.kernel(session), relay_heard=board.relay_heard(session))
    checkpoints = node.registry.checkpoints(session.id)
    processes = pids(session)
    last_activity = max(session.last_activity, session.created, board.activity.get(session.id, 0.0))
    if not whole:
        session = msgspec.structs.replace(session, launch=msgspec.structs.replace(session.launch, env={}))
    view: dict[str, Any] = msgspec.to_builtins(session)
    view |= {
        "pids": processes,
        "rss_bytes": procfs.rss_bytes(processes),
        "folder": str(node.paths.session(session.id)),
        "last_activity": last_activity,
        "idle_seconds": max(time.time() - last_activity, 0.0),
        "verdict": verdict_view(node, session),
        "checkpoints": [checkpoint_view(one) if full else one.id for one in checkpoints],
    }
    return view


def checkpoint_view(checkpoint: Checkpoint) -> dict[str, Any]:
    """All of a checkpoint's record."""
    view: dict[str, Any] = msgspec.to_builtins(checkpoint)
    return view


def verdict_view(node: Node, session: Session) -> dict[str, Any]:
    """The timer's last verdict of a running session, or why there is none."""
    verdict = node.board.verdicts.get(session.id)
    if session.state is State.RUNNING and verdict is not None:
        told: dict[str, Any] = msgspec.to_builtins(verdict)
        return told
    if session.state is State.RUNNING:
        return _no_verdict(session, "Not judged yet; unknown counts as busy.")
    if session.state is State.HIBERNATED:
        return _no_verdict(session, _since_when(node, session), f"Bring it back with: torpor resume {session.name}")
    return _no_verdict(session, f"The session is {session.state}; only a running one is judged.")


def pids(session: Session) -> list[int]:
    """The session's processes as the node numbers them, init first; none when it is away or gone."""
    init = session.init
    return procfs.tree(init.pid) if init is not None and is_alive(init) else []


def _since_when(node: Node, session: Session) -> str:
    last = node.registry.last_operation(session.id)
    used = f"last used {_clock(max(session.last_activity, session.created))}"
    if last is None or last.kind is not OperationKind.HIBERNATE or last.ended is None:
        return f"Hibernated, {used}."
    return f"Hibernated for {spoken_duration(time.time() - last.ended)} (since {_clock(last.ended)}), {used}."


def _clock(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def _no_verdict(session: Session, sentence: str, would_change: str = "") -> dict[str, Any]:
    since = max(session.last_activity, session.created)
    return {"verdict": "unknown", "since": since, "sentence": sentence, "would_change": would_change}
