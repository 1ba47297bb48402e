"""Plain data that every layer shares: what a session, a checkpoint and an operation are.

These structs are what the registry stores and what the API sends, so their field names are a format:
add fields with defaults, never rename.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec


class State(StrEnum):
    """Where a session is. Transitional states name the operation in progress."""

    STARTING = "starting"
    RUNNING = "running"
    CHECKPOINTING = "checkpointing"
    SUSPENDED = "suspended"
    HIBERNATING = "hibernating"
    HIBERNATED = "hibernated"
    RESUMING = "resuming"
    ENDED = "ended"
    FAILED = "failed"


TRANSITIONAL = frozenset({State.STARTING, State.CHECKPOINTING, State.HIBERNATING, State.RESUMING})
ALIVE = frozenset({State.STARTING, State.RUNNING, State.CHECKPOINTING, State.SUSPENDED, State.HIBERNATING})


class OperationKind(StrEnum):
    """What a worker can do to a session."""

    CHECKPOINT = "checkpoint"
    HIBERNATE = "hibernate"
    RESUME = "resume"


class InputOutput(StrEnum):
    """How a session's standard streams are wired."""

    DETACHED = "detached"  # stdin /dev/null; stdout and stderr appended to out.log
    STREAMS = "streams"  # stdin a FIFO; stdout to out.log, stderr to err.log; the client tails them
    TERMINAL = "terminal"  # a pseudo-terminal whose master the keeper holds


class ProcessId(msgspec.Struct, frozen=True):
    """A process that cannot be mistaken for another: pid on the node, start time in clock ticks, boot id."""

    pid: int
    start_time: int
    boot_id: str


class Caller(msgspec.Struct, frozen=True):
    """Who asked for a session, as the kernel tells (peer credentials and /proc of the peer)."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()
    umask: int = 0o022
    affinity: tuple[int, ...] = ()
    limits: dict[str, tuple[int, int]] = {}  # resource name without RLIMIT_, -1 = unlimited
    cgroups: tuple[str, ...] = ()  # lines of /proc/PID/cgroup
    namespaces: dict[str, str] = {}  # mnt, user, pid, net, ipc, uts: link targets
    capabilities_bounding: int = 0
    nice: int = 0
    oom_score_adj: int = 0


class Launch(msgspec.Struct, frozen=True):
    """What to start and how."""

    argv: tuple[str, ...]
    cwd: str
    env: dict[str, str]
    io: InputOutput = InputOutput.DETACHED
    rows: int = 24
    columns: int = 80


class Kernel(msgspec.Struct, frozen=True):
    """What the relay last said of its Jupyter kernel."""

    execution_state: str = "starting"  # starting, idle, busy, unknown
    since: float = 0.0  # seconds since the epoch
    queued: int = 0  # requests held or not yet answered
    waiting_for_input: bool = False
    last_message: float = 0.0  # last real message (not kernel_info, comm_info, reconnects)
    heard: float = 0.0  # when the relay last spoke
    lossless: bool = False  # it has an inner half: what is under way is saved with it


class Checkpoint(msgspec.Struct):
    """One stored checkpoint of a session."""

    id: str
    session: str
    kind: OperationKind
    created: float
    parent: str | None
    bytes_logical: int
    bytes_stored: int
    bytes_new: int
    seconds: dict[str, float]
    verified: float | None = None  # when last verified, seconds since the epoch


class Session(msgspec.Struct):
    """One session as the registry keeps it. Times are seconds since the epoch."""

    id: str
    name: str
    state: State
    uid: int
    owner: str
    node: str
    created: float
    launch: Launch
    caller: Caller
    labels: dict[str, str] = {}
    kind: str = "command"  # or "kernel"
    kernel: Kernel | None = None
    init: ProcessId | None = None
    idle_after: float | None = None  # seconds; None = what the policy says
    last_activity: float = 0.0
    version: int = 0  # grows with every change of state
    lease: int = 0  # fencing token: grows with every resume
    answered: int = 0  # the version whose resume the relay saw answered
    exit_status: int | None = None
    error: dict[str, str] | None = None  # why the last operation failed
    terminal: str | None = None  # path of the pty slave, when io is TERMINAL
    ended: float | None = None  # when it ended or failed
    relay_heard: float = 0.0  # when the relay of a kernel session last asked or told anything; 0 = no relay ever
    quiesced_version: int = 0  # the `hibernating` version that the relay answered last
    quiesced_ok: bool = False  # its answer: nothing is in flight
    quiesced_reason: str = ""  # its sentence when something is
    quiesced_lossless: bool = False  # what is in flight is saved with the session
    notes: tuple[str, ...] = ()  # what its owner should know of the last resume
    lost: str | None = None  # the sentence on what the last resume lost, if it went back to an older checkpoint
    died: float | None = None  # when it ended without being saved; a resume then goes back to before that
    on_failure: str | None = None  # "resume" or "none"; None = what the policy says
    revived: float = 0.0  # when it was last brought back by itself after a failure
    outside: bool = False  # adopted, and its processes still run where they were started: not in namespaces of its own


class Operation(msgspec.Struct):
    """One transition as the journal keeps it."""

    id: str
    session: str
    kind: OperationKind
    steps: tuple[str, ...]
    done: tuple[str, ...] = ()
    started: float = 0.0
    ended: float | None = None
    outcome: str | None = None  # completed, undone, None while in progress
    worker: ProcessId | None = None
    checkpoint: str | None = None  # the one made, or the one resumed from
    result: dict[str, Any] | None = None
    error: dict[str, str] | None = None
    before: State = State.RUNNING  # the session's state when it started
    if_idle: bool = False  # a kernel that is in the middle of something is left alone
    processes: tuple[ProcessId, ...] = ()  # CRIU and its half-restored tree: ended when the operation is undone
