"""Every error Torpor raises on purpose, with its code for machines and its exit status.

An error says three things: what happened (`message`), what was kept safe (`safe`) and what to do next
(`hint`). The code crosses the wire unchanged; the exit status is what the command line returns.
"""

from __future__ import annotations

from typing import ClassVar


class TorporError(Exception):
    """Base of all errors raised on purpose. `message`, `safe` and `hint` are full sentences or empty."""

    code: ClassVar[str] = "internal"
    exit_status: ClassVar[int] = 1

    def __init__(self, message: str, *, safe: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.safe = safe
        self.hint = hint

    def __str__(self) -> str:
        return " ".join(part for part in (self.message, self.safe, self.hint) if part)

    def as_dict(self) -> dict[str, str]:
        """The error as it crosses the wire: keys `code`, `message`, `safe`, `hint`."""
        return {"code": self.code, "message": self.message, "safe": self.safe, "hint": self.hint}


class UsageError(TorporError):
    """The request itself is wrong; nothing was changed."""

    code = "usage"
    exit_status = 2


class NotFound(TorporError):
    """No such session or checkpoint among those the caller may see."""

    code = "not_found"
    exit_status = 3


class NotPermitted(TorporError):
    """The caller may not do this."""

    code = "not_permitted"
    exit_status = 4


class Conflict(TorporError):
    """The session is in a state, or in the middle of an operation, that forbids this now."""

    code = "conflict"
    exit_status = 5


class PreflightRefused(TorporError):
    """Something in the tree cannot be saved; it was found before the tree was touched."""

    code = "preflight"
    exit_status = 6


class Incompatible(TorporError):
    """The checkpoint's record says that it cannot be restored here."""

    code = "incompatible"
    exit_status = 7


class IntegrityError(TorporError):
    """Stored bytes are not what was written: damaged, or signed by another site's key."""

    code = "integrity"
    exit_status = 8


class StoreError(TorporError):
    """The store cannot take or give bytes (full, unreadable)."""

    code = "store"
    exit_status = 9


class NewerFormat(StoreError):
    """A record was written by a newer Torpor than this one."""

    code = "newer_format"


class EngineError(TorporError):
    """CRIU or the kernel refused, failed or did not finish before its deadline."""

    code = "engine"
    exit_status = 10


class AgentUnreachable(TorporError):
    """No agent answers on this node's socket."""

    code = "agent_unreachable"
    exit_status = 11


class SetupError(TorporError):
    """Something that Torpor needs on this machine is missing and could not be installed."""

    code = "setup"
    exit_status = 12


BY_CODE: dict[str, type[TorporError]] = {
    kind.code: kind
    for kind in (
        TorporError,
        UsageError,
        NotFound,
        NotPermitted,
        Conflict,
        PreflightRefused,
        Incompatible,
        IntegrityError,
        StoreError,
        NewerFormat,
        EngineError,
        AgentUnreachable,
        SetupError,
    )
}


def from_dict(wire: dict[str, str]) -> TorporError:
    """The error that `as_dict` described; an unknown code becomes a plain `TorporError`."""
    kind = BY_CODE.get(wire.get("code", ""), TorporError)
    return kind(wire.get("message", "unknown error"), safe=wire.get("safe", ""), hint=wire.get("hint", ""))
