"""Which session a caller means, and whether it is theirs.

A user reaches their own sessions, root all. A member of the policy's group of admins sees those of others, too, and may
save them and bring them back; they may not look into one, speak to it or end it.
"""

from __future__ import annotations

from typing import cast

from starlette.requests import Request

from torpor.agent.node import Node
from torpor.api.peer import Peer, peer_of
from torpor.errors import NotFound, NotPermitted
from torpor.model import Checkpoint, Session


def node_of(request: Request) -> Node:
    """The node that this application serves."""
    return cast(Node, request.app.state.node)


def caller_of(request: Request) -> Peer:
    """Who asks. Raises NotPermitted when that is not known."""
    return peer_of(cast(dict[str, object], request.scope))


def session_of(request: Request, *, admins: bool = False) -> Session:
    """The session that the path names; `admins` may mean those of others.

    Raises NotFound for those of others as for those that do not exist, NotPermitted to an admin who may only see it.
    """
    return find_session(node_of(request), caller_of(request), request.path_params["ref"], admins=admins)


def sees_all(node: Node, caller: Peer) -> bool:
    """Whether the caller, root or an admin, sees the sessions of others."""
    return caller.sees_all or caller.is_member(node.policy.current().admins)


def may_look_into(caller: Peer, session: Session) -> bool:
    """Whether the caller may know what is in a session: its environment, its output."""
    return caller.sees_all or caller.uid == session.uid


def find_session(node: Node, caller: Peer, ref: str, *, admins: bool = False) -> Session:
    """A session by the caller's own name for it or by its id; who sees all may also use a name that only one user has.

    Raises as `session_of`.
    """
    own = node.registry.by_name(caller.uid, ref)
    if own is not None:
        return own
    visible = node.registry.sessions(None if sees_all(node, caller) else caller.uid)
    by_id = [session for session in visible if session.id == ref]
    by_name = [session for session in visible if session.name == ref]
    for found in (by_id, by_name):
        if len(found) == 1:
            return _permitted(caller, found[0], admins=admins)
    if by_name:
        raise NotFound(f"Several users have a session named {ref}.", hint="Use its id; torpor ls shows it.")
    raise NotFound(f"You have no session {ref}.", hint="torpor ls shows those you have.")


def find_checkpoint(node: Node, caller: Peer, ref: str) -> Checkpoint:
    """A checkpoint of a session of the caller's; root's are all. Raises NotFound."""
    refusal = NotFound(f"You have no session and no checkpoint {ref}.", hint="torpor ls shows your sessions.")
    try:
        checkpoint = node.registry.checkpoint(ref)
        session = node.registry.session(checkpoint.session)
    except NotFound as error:
        raise refusal from error
    if not may_look_into(caller, session):
        raise refusal
    return checkpoint


def _permitted(caller: Peer, session: Session, *, admins: bool) -> Session:
    if admins or may_look_into(caller, session):
        return session
    raise NotPermitted(
        f"Session {session.name} belongs to {session.owner}, and only its owner may do that.",
        safe="Nothing was changed.",
        hint="An admin may show, save and resume it.",
    )
