"""Which session a caller means, and whether it is theirs."""

from __future__ import annotations

from typing import cast

from starlette.requests import Request

from torpor.agent.node import Node
from torpor.api.peer import Peer, peer_of
from torpor.errors import NotFound
from torpor.model import Checkpoint, Session


def node_of(request: Request) -> Node:
    """The node that this application serves."""
    return cast(Node, request.app.state.node)


def caller_of(request: Request) -> Peer:
    """Who asks. Raises NotPermitted when that is not known."""
    return peer_of(cast(dict[str, object], request.scope))


def session_of(request: Request) -> Session:
    """The session that the path names. Raises NotFound for those of others as for those that do not exist."""
    return find_session(node_of(request), caller_of(request), request.path_params["ref"])


def find_session(node: Node, caller: Peer, ref: str) -> Session:
    """A session by the caller's own name for it or by its id; root may also use a name that only one user has."""
    own = node.registry.by_name(caller.uid, ref)
    if own is not None:
        return own
    visible = node.registry.sessions(None if caller.sees_all else caller.uid)
    by_id = [session for session in visible if session.id == ref]
    by_name = [session for session in visible if session.name == ref]
    for found in (by_id, by_name):
        if len(found) == 1:
            return found[0]
    if by_name:
        raise NotFound(f"Several users have a session named {ref}.", hint="Use its id; torpor ls shows it.")
    raise NotFound(f"You have no session {ref}.", hint="torpor ls shows those you have.")


def find_checkpoint(node: Node, caller: Peer, ref: str) -> Checkpoint:
    """A checkpoint of a session that the caller may see. Raises NotFound."""
    refusal = NotFound(f"You have no session and no checkpoint {ref}.", hint="torpor ls shows your sessions.")
    try:
        checkpoint = node.registry.checkpoint(ref)
        session = node.registry.session(checkpoint.session)
    except NotFound as error:
        raise refusal from error
    if not caller.sees_all and session.uid != caller.uid:
        raise refusal
    return checkpoint
