"""The transitions that save a session: checkpoint (it goes on running) and hibernate (it ends)."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from torpor.engine import affinity, compat, filetree, images, places, preflight, procfs, terminals
from torpor.engine.dump import Dump
from torpor.engine.keeper_client import KeeperClient
from torpor.engine.pagestream import PAGE, SEGMENT, SegmentPool
from torpor.errors import Conflict, PreflightRefused, StoreError
from torpor.model import Checkpoint, InputOutput, OperationKind, ProcessId, State
from torpor.sessions.executor import Context, Done, Stopwatch, deadline, tell_keeper
from torpor.sessions.files_saved import FilesSaved
from torpor.store import Manifest, Object

QUIESCE_DEADLINE = 15.0  # seconds a relay may take to see that nothing is in flight
RELAY_SILENCE = 90.0  # a relay that was not heard for so long is gone
HIBERNATE_BUFFER = 256 << 20
CHECKPOINT_BUFFER = 4 << 30
BUFFER_SLACK = 20  # one in so many bytes of a segment stays empty, because chunks are not split
FREE_DISK = 64 << 20  # must be left on the store's disk beside the session's memory
RECORD_FORMAT = 1
SHARING_DOMAIN = "site"  # chunks are shared by all sessions of the store
CHUNKER = "mapping-relative-64k-256k/1"
NO_CIPHER = "none"
SCHEDULERS = ("SLURM_JOB", "SLURM_STEP", "PBS_JOB", "LSB_JOB", "KUBERNETES_", "RAY_JOB", "CUDA_VISIBLE")


class Saving:
    """One checkpoint or hibernation, step by step; see `planner` for the order."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._hibernate = context.operation.kind is OperationKind.HIBERNATE
        self._id = "c-" + secrets.token_hex(6)
        self._writer = context.store.writer()
        self.past_return = False
        self._dump: Dump | None = None
        self._files_begun: list[FilesSaved] = []
        self._committed = False
        self._manifest: Manifest | None = None
        self._watch = Stopwatch()
        self._resident = 0
        self._freeze_started = 0.0
        assert context.session.init is not None
        self._init: ProcessId = context.session.init

    def steps(self) -> dict[str, Callable[[], None]]:
        """What to call for each step."""
        return {
            "quiesce": self._quiesce,
            "preflight": self._preflight,
            "dump": self._save_tree,
            "seal": self._seal,
            "commit": self._commit,
            "verify": self._verify,
            "end": self._end,
        }

    def record(self) -> Done:
        """Puts the checkpoint on record."""
        self._watch.total()
        assert self._manifest is not None
        logical, stored, new = self._sizes()
        checkpoint = Checkpoint(
            id=self._id,
            session=self._context.session.id,
            kind=self._context.operation.kind,
            created=self._manifest.created,
            parent=self._manifest.parent,
            bytes_logical=logical,
            bytes_stored=stored,
            bytes_new=new,
            seconds=self._watch.seconds,
            verified=time.time(),
        )
        self._context.registry.add_checkpoint(checkpoint)
        self._writer.abort()  # after the commit: lets go of the store
        if not self._hibernate:
            return Done(State.RUNNING, result_of(checkpoint), {})
        return Done(State.HIBERNATED, result_of(checkpoint), {"init": None})

    def undo(self) -> None:
        """The session is as before; nothing of this attempt is left."""
        if self._dump is not None:
            self._dump.undo(self._context.log)
            wake_stopped(self._init)
        if self._committed:
            self._context.store.delete(self._context.session.id, self._id)
        for files in self._files_begun:
            files.undo()
        self._writer.abort()

    def _quiesce(self) -> None:
        """Waits until the relay forwards nothing more. A cell that runs is a reason to refuse only where what is on
        its way would be lost, or nobody wanted more than an idle kernel to be hibernated."""
        context = self._context
        give_up = time.monotonic() + QUIESCE_DEADLINE
        while True:
            session = context.registry.session(context.session.id)
            if not session.relay_heard or time.time() - session.relay_heard > RELAY_SILENCE:
                return
            if session.quiesced_version >= session.version:
                if session.quiesced_ok or (session.quiesced_lossless and not context.operation.if_idle):
                    return
                raise Conflict(
                    session.quiesced_reason or "The kernel is busy.",
                    safe="The session goes on running.",
                    hint="Hibernate it when its cell has ended.",
                )
            if time.monotonic() > give_up:
                raise Conflict(
                    "The kernel's relay did not confirm that nothing is in flight.",
                    safe="The session goes on running.",
                    hint="Try again; if it happens again, look at the notebook server's log.",
                )
            time.sleep(0.01)

    def _preflight(self) -> None:
        context = self._context
        pids = procfs.tree(self._init.pid)
        if not pids or procfs.start_time(self._init.pid) != self._init.start_time:
            raise Conflict(f"Session {context.session.name} has just ended by itself.")
        around = context.session.caller.namespaces if context.session.outside else None
        found = preflight.objections(self._init.pid, context.session.terminal, around=around)
        if found:
            raise PreflightRefused(
                "The session cannot be saved. " + " ".join(found),
                safe="Nothing was touched; it goes on running.",
                hint="Close what is named, then try again.",
            )
        self._resident = procfs.rss_bytes(pids)
        free = os.statvfs(context.paths.store)
        available = free.f_bavail * free.f_frsize
        if available < self._resident + FREE_DISK:
            raise StoreError(
                f"The store's disk has {available >> 20} MiB free; the session may need {self._resident >> 20} MiB.",
                safe="Nothing was touched; it goes on running.",
                hint="Remove sessions or checkpoints that are not needed, or move the store to a larger disk.",
            )
        self._held = self._ask_keeper()
        self._affinities = affinity.of_tree(self._init.pid)
        self._files = FilesSaved(context, self._init, self._id, self._writer.put)
        self._files_begun.append(self._files)
        self._files.begin()
        context.registry.note_checkpoint(context.operation.id, self._id)
        self._watch.lap("preflight")

    def _save_tree(self) -> None:
        context = self._context
        pool = self._pool()
        self._watch.lap("buffers")
        self._freeze_started = time.monotonic()
        self._dump = Dump(
            context.criu,
            self._init,
            context.scratch,
            self._put,
            pool,
            leave_running=not self._hibernate,
            deadline=deadline(self._resident),
            extra=terminals.dump_arguments(context.session),
            note=context.note,
            user=(context.session.uid, context.session.caller.gid),
            outside=context.session.outside,
        )
        self._shared_memory = self._dump.stream()
        places.require_helpers(context.scratch)
        self._files.frozen(pin=self._hibernate)
        self._watch.lap("transfer")
        if not self._hibernate:
            self._watch.seconds["freeze"] = round(self._dump.let_go(), 4)

    def _seal(self) -> None:
        assert self._dump is not None
        self._objects = {found.name: found for found in self._dump.stored()}
        self._images = self._store_images()
        self._writer.seal()
        self._watch.lap("durable")

    def _commit(self) -> None:
        context = self._context
        parents = context.registry.checkpoints(context.session.id)
        objects = {
            name: an_object(found.ids, found.lengths, images.pack_entries(found.entries))
            for name, found in self._objects.items()
        }
        tree = self._shared_memory
        objects["shm"] = an_object(tree.ids, tree.lengths, msgspec.msgpack.encode(tree.nodes))
        objects["images"] = self._images
        objects |= self._files.objects
        self._manifest = Manifest(
            site=context.store.key_id,
            key_id=context.store.key_id,
            domain=SHARING_DOMAIN,
            chunker=CHUNKER,
            cipher=NO_CIPHER,
            session=context.session.id,
            checkpoint=self._id,
            created=time.time(),
            parent=parents[0].id if parents else None,
            record=self._record(),
            objects=objects,
        )
        self._writer.commit(self._manifest)
        self._committed = True
        self._watch.seconds["durable"] = round(self._watch.seconds["durable"] + self._since_lap(), 4)

    def _verify(self) -> None:
        self._writer.verify()
        self._watch.lap("verify")

    def _end(self) -> None:
        assert self._dump is not None
        self._dump.require_frozen()
        tell_keeper(self._context.paths, lambda keeper: keeper.away(self._context.session.id, True))
        others = self._others()
        self._context.note(*others)  # these do not die with the first process, as they do in a namespace
        self.past_return = True
        self._dump.end_tree(others)
        for process in (self._init, *others):
            wait_gone(process)
        if self._context.session.outside:
            filetree.remove(Path("/dev/shm"), self._shared_memory.nodes)
        self._watch.seconds["freeze"] = round(time.monotonic() - self._freeze_started, 4)

    def _others(self) -> list[ProcessId]:
        """The processes beside the first one of an adopted tree that still runs where it was started."""
        if not self._context.session.outside:
            return []
        return [ProcessId(*procfs.identify(pid), self._init.boot_id) for pid in procfs.tree(self._init.pid)[1:]]

    def _since_lap(self) -> float:
        self._watch.lap("commit")
        return self._watch.seconds.pop("commit")

    def _put(self, segment: memoryview, cuts: list[int], /) -> list[bytes]:
        ids = self._writer.put(segment, cuts)
        dump = self._dump
        if dump is not None:
            self._context.progress("transfer", dump.receiver.bytes_received, self._resident)
        return ids

    def _ask_keeper(self) -> dict[str, str]:
        """CRIU's names for what the keeper holds of this session."""
        if self._context.session.launch.io is InputOutput.DETACHED:
            return {}
        with closing(KeeperClient(self._context.paths)) as keeper:
            return terminals.keys(self._context.session, keeper)

    def _pool(self) -> SegmentPool:
        """Memory for what waits to be stored: for a checkpoint all of it where there is room, for a short freeze."""
        if self._hibernate:
            return SegmentPool(HIBERNATE_BUFFER)
        available = compat.this_host(self._context.criu.version).memory_available
        limit = max(HIBERNATE_BUFFER, min(CHECKPOINT_BUFFER, available // 3))
        return SegmentPool(limit, touched=self._resident + self._resident // BUFFER_SLACK)

    def _store_images(self) -> Object:
        """CRIU's small images, one after another, each cut by itself."""
        names: list[tuple[str, int]] = []
        ids: list[bytes] = []
        lengths: list[int] = []
        for path in images.small_images(self._context.scratch):
            content = memoryview(path.read_bytes())
            names.append((path.name, len(content)))
            for start in range(0, len(content), SEGMENT):
                piece = content[start : start + SEGMENT]
                cuts = [*range(filetree.BLOCK, len(piece), filetree.BLOCK), len(piece)]
                ids += self._writer.put(piece, cuts)
                lengths += [cut - before for before, cut in zip([0, *cuts], cuts, strict=False)]
        return an_object(ids, lengths, msgspec.msgpack.encode(names))

    def _record(self) -> dict[str, Any]:
        """Everything that a later decision may need to know about this checkpoint."""
        context, session = self._context, self._context.session
        environment = json.dumps(sorted(session.launch.env.items())).encode()
        return {
            "format": RECORD_FORMAT,
            "kind": str(context.operation.kind),
            "session": {
                "name": session.name,
                "uid": session.uid,
                "owner": session.owner,
                "labels": session.labels,
                "kind": session.kind,
                "argv": list(session.launch.argv),
                "cwd": session.launch.cwd,
                "io": str(session.launch.io),
                "environment_digest": hashlib.sha256(environment).hexdigest(),
            },
            "caller": msgspec.to_builtins(session.caller),
            "scheduler": scheduler_environment(session.launch.env),
            "host": msgspec.to_builtins(compat.this_host(context.criu.version)),
            "held": self._held,
            "outside": session.outside,
            "affinities": self._affinities,
            "files": self._files.record(),
            "page_size": PAGE,
            "resident": self._resident,
            "kernel_state": msgspec.to_builtins(session.kernel),
            "seconds": dict(self._watch.seconds),
        }

    def _sizes(self) -> tuple[int, int, int]:
        stats = self._writer.stats
        return stats.logical, stats.stored, stats.new


def an_object(ids: list[bytes], lengths: list[int], meta: bytes) -> Object:
    """An object of a manifest."""
    return Object(size=sum(lengths), chunks=b"".join(ids), lengths=lengths, meta=meta)


def result_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """What `checkpoint` and `hibernate` print as JSON."""
    return {
        "id": checkpoint.id,
        "session": checkpoint.session,
        "bytes_logical": checkpoint.bytes_logical,
        "bytes_stored": checkpoint.bytes_stored,
        "bytes_new": checkpoint.bytes_new,
        "seconds": checkpoint.seconds,
    }


def scheduler_environment(environment: dict[str, str]) -> dict[str, str]:
    """What a batch system told the session about its job."""
    return {name: value for name, value in environment.items() if name.startswith(SCHEDULERS)}


def wake_stopped(init: ProcessId) -> None:
    """After CRIU was ended by force: waits until the kernel has detached it, so that the tree runs again."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and procfs.traced(procfs.tree(init.pid)):
        time.sleep(0.01)


def wait_gone(init: ProcessId) -> None:
    """Waits until a killed init has released everything (its parent reaps it)."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and procfs.alive(init.pid, init.start_time, init.boot_id):
        time.sleep(0.002)
