"""What callers may send, checked before anything is done with it."""

from __future__ import annotations

import asyncio
import re
import signal
from pathlib import PurePosixPath
from typing import TypeVar

import msgspec
from starlette.requests import Request

from torpor.agent.turns import Turns
from torpor.errors import UsageError
from torpor.model import InputOutput, Kernel

BODY_LIMIT = 64 << 10  # bytes
LARGE_BODY_LIMIT = 4 << 20  # bytes of a new session; an environment may be large
LARGE_AT_ONCE = 4  # bodies, and answers, of one user
ARRIVES_WITHIN = 30.0  # seconds
DRAINED_LIMIT = 64 << 20  # bytes that are read on and thrown away, so that a caller who sent too much hears so
ARGUMENTS_LIMIT = 2 << 20  # bytes of argv and env together: what the kernel takes at most
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
LABELS_LIMIT = 64
LABEL_VALUE_LIMIT = 1024
TERMINAL_SIDE_LIMIT = 10_000
KINDS = ("command", "kernel")
ON_FAILURE = ("resume", "none")


class NewSession(msgspec.Struct, forbid_unknown_fields=True):
    """A command to start; `idle_after` in seconds; None for what the policy says, in `on_failure`, too."""

    argv: list[str]
    cwd: str
    env: dict[str, str]
    io: InputOutput = InputOutput.DETACHED
    name: str | None = None
    rows: int = 24
    columns: int = 80
    labels: dict[str, str] = {}
    idle_after: float | None = None
    kind: str = "command"
    on_failure: str | None = None


class Adoption(msgspec.Struct, forbid_unknown_fields=True):
    """A running process to make a session of; `dry_run`: only look."""

    pid: int
    name: str | None = None
    labels: dict[str, str] = {}
    idle_after: float | None = None
    dry_run: bool = False


class Signal(msgspec.Struct, forbid_unknown_fields=True):
    """A signal for the main command's process group."""

    signal: int


class End(msgspec.Struct, forbid_unknown_fields=True):
    """End a session; `keep` its checkpoints."""

    keep: bool = False


class KernelReport(msgspec.Struct, forbid_unknown_fields=True):
    """What a relay says of its kernel."""

    execution_state: str
    since: float
    queued: int = 0
    waiting_for_input: bool = False
    last_message: float = 0.0
    lossless: bool = False

    def as_heard(self, heard: float) -> Kernel:
        """The report as the model keeps it."""
        return Kernel(
            execution_state=self.execution_state,
            since=self.since,
            queued=self.queued,
            waiting_for_input=self.waiting_for_input,
            last_message=self.last_message,
            lossless=self.lossless,
            heard=heard,
        )


class Quiesced(msgspec.Struct, forbid_unknown_fields=True):
    """The relay's answer to a session that is about to be hibernated."""

    version: int
    ok: bool
    reason: str = ""
    lossless: bool = False


class Answered(msgspec.Struct, forbid_unknown_fields=True):
    """The kernel has answered after a resume."""

    version: int


class Verify(msgspec.Struct, forbid_unknown_fields=True):
    """A session, or one checkpoint."""

    ref: str


Body = TypeVar("Body")
_large = Turns(LARGE_AT_ONCE)


async def body_of(request: Request, kind: type[Body]) -> Body:
    """The request's JSON body. Raises UsageError when it is too large or not of this kind."""
    return await _body(request, kind, BODY_LIMIT)


async def large_body_of(request: Request, kind: type[Body], uid: int) -> Body:
    """As `body_of`; a user sends only a few of these at once, and the others of theirs wait.

    Raises UsageError also when it does not arrive in time.
    """
    async with _large.turn(uid):
        try:
            async with asyncio.timeout(ARRIVES_WITHIN):
                return await _body(request, kind, LARGE_BODY_LIMIT)
        except TimeoutError as error:
            raise UsageError(f"The request did not arrive within {ARRIVES_WITHIN:.0f} seconds.") from error


async def _body(request: Request, kind: type[Body], limit: int) -> Body:
    content = bytearray()
    received = 0
    async for piece in request.stream():
        received += len(piece)
        if received <= limit:
            content += piece
        elif received > DRAINED_LIMIT:
            break
    if received > limit:
        raise UsageError(f"The request is larger than {limit >> 10} KiB.")
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"The request is not understood: {error}.") from error


def number_of(request: Request, name: str, default: float, low: float, high: float) -> float:
    """A number in the query, held between `low` and `high`. Raises UsageError for what is no number."""
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError as error:
        raise UsageError(f"{name}={text} is not a number.") from error
    if value != value:
        raise UsageError(f"{name}={text} is not a number.")
    return min(max(value, low), high)


def check_new_session(new: NewSession) -> None:
    """Raises UsageError with the first thing that is wrong."""
    if not new.argv or not new.argv[0]:
        raise UsageError("There is no command to run.", hint="Name it after --: torpor run -- python train.py")
    if not PurePosixPath(new.cwd).is_absolute():
        raise UsageError(f"The working directory {new.cwd!r} is not absolute.")
    texts = [*new.argv, new.cwd, *new.env.keys(), *new.env.values(), *new.labels.values()]
    if any("\0" in text for text in texts):
        raise UsageError("An argument or a variable holds a zero byte.")
    if any("=" in name or not name for name in new.env):
        raise UsageError("A variable's name is empty or holds an equals sign.")
    if sum(len(text.encode(errors="surrogateescape")) for text in texts) > ARGUMENTS_LIMIT:
        raise UsageError(f"Command and environment are larger than {ARGUMENTS_LIMIT >> 20} MiB.")
    _check_facts(new)
    if not (0 < new.rows <= TERMINAL_SIDE_LIMIT and 0 < new.columns <= TERMINAL_SIDE_LIMIT):
        raise UsageError(f"A terminal of {new.rows} rows and {new.columns} columns is not possible.")
    if new.on_failure is not None and new.on_failure not in ON_FAILURE:
        raise UsageError(f"{new.on_failure!r} is nothing that can be done on failure.", hint="Use resume or none.")
    if new.kind not in KINDS:
        raise UsageError(f"{new.kind!r} is no kind of session.", hint=f"Known are {', '.join(KINDS)}.")


def check_adoption(asked: Adoption) -> None:
    """Raises UsageError with the first thing that is wrong."""
    if not 0 < asked.pid < 1 << 31:
        raise UsageError(f"{asked.pid} is not the number of a process.")
    _check_facts(asked)


def check_signal(signum: int) -> None:
    """Raises UsageError when there is no such signal."""
    if signum not in signal.valid_signals():
        raise UsageError(f"There is no signal {signum}.")


def _check_facts(new: NewSession | Adoption) -> None:
    if new.name is not None and not NAME.fullmatch(new.name):
        raise UsageError(
            f"{new.name!r} cannot be a session's name.",
            hint="Use up to 63 letters, digits, dots, dashes and underscores, a letter or digit first.",
        )
    _check_labels(new.labels)
    if new.idle_after is not None and not 0 < new.idle_after < float("inf"):
        raise UsageError("The time after which a session counts as idle must be longer than nothing.")


def _check_labels(labels: dict[str, str]) -> None:
    if len(labels) > LABELS_LIMIT:
        raise UsageError(f"A session has at most {LABELS_LIMIT} labels.")
    for name, value in labels.items():
        if not LABEL.fullmatch(name):
            raise UsageError(f"{name!r} cannot be a label's name.")
        if len(value) > LABEL_VALUE_LIMIT:
            raise UsageError(f"The value of label {name} is longer than {LABEL_VALUE_LIMIT} characters.")
