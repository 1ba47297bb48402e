"""The transition that brings a session back from its newest verified checkpoint."""

from __future__ import annotations

import logging
import os
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from torpor.durations import spoken_duration
from torpor.engine import affinity, filetree, images, interrupted, places, ports, private_mounts, procfs, terminals
from torpor.engine.files_kept import OBJECT
from torpor.engine.home import Home
from torpor.engine.keeper_client import KeeperClient, clear_exit_status, session_python
from torpor.engine.launcher import join_cgroups
from torpor.engine.restore import Restore, empty_object, lay_out_memory
from torpor.errors import Conflict, IntegrityError, NotFound
from torpor.model import Checkpoint, InputOutput, ProcessId, State
from torpor.sessions import compatibility
from torpor.sessions.executor import Context, Done, Stopwatch, deadline, tell_keeper
from torpor.sessions.files_back import FilesBack
from torpor.sessions.saving import RELAY_SILENCE
from torpor.store import Manifest

logger = logging.getLogger(__name__)

ANSWER_DEADLINE = 20.0  # seconds to wait for a kernel's first answer before the resume counts as complete anyway


class Resuming:
    """One resume, step by step; see `planner` for the order."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._watch = Stopwatch()
        self._restore: Restore | None = None
        self._made: list[FilesBack] = []
        self._init: ProcessId | None = None
        self._token = 0
        self.past_return = False
        self._inherited: list[int] = []
        self._home: Home | None = None
        self._window: tuple[int, tuple[int, int]] | None = None
        self._checkpoint = self._choose()

    def steps(self) -> dict[str, Callable[[], None]]:
        """What to call for each step."""
        return {
            "lease": self._lease,
            "compatibility": self._compatibility,
            "lay_out": self._lay_out_authenticated,
            "restore": self._restore_tree,
            "run": self._run,
            "answer": self._answer,
        }

    def record(self) -> Done:
        """The session is back."""
        self._watch.seconds["complete"] = 0.0
        self._watch.lap("complete")
        self._watch.total()
        result: dict[str, Any] = {
            "id": self._checkpoint.id,
            "session": self._checkpoint.session,
            "bytes_logical": self._checkpoint.bytes_logical,
            "bytes_stored": self._checkpoint.bytes_stored,
            "bytes_new": 0,
            "seconds": self._watch.seconds,
            **self._lost(),
            "notes": list(self._context.registry.session(self._checkpoint.session).notes),
        }
        changes = {"last_activity": time.time(), "exit_status": None, "ended": None, "died": None}
        return Done(State.RUNNING, result, changes)

    def undo(self) -> None:
        """The session is as before; nothing of this attempt is left."""
        if self._restore is not None:
            self._restore.undo(self._context.log)
        if self._home is not None:
            self._home.end()
        for made in self._made:
            made.undo()
        self._close_inherited()

    def _choose(self) -> Checkpoint:
        context = self._context
        for checkpoint in context.registry.checkpoints(context.session.id):
            if checkpoint.verified is not None and context.operation.checkpoint in (None, checkpoint.id):
                return checkpoint
        raise NotFound(
            f"Session {context.session.name} has no verified checkpoint to come back from.",
            hint=f"See: torpor checkpoints {context.session.name}",
        )

    def _lost(self) -> dict[str, Any]:
        """What is lost: of a session that died, what it did since; of a damaged checkpoint, what an older one lacks."""
        checkpoints = self._context.registry.checkpoints(self._checkpoint.session)
        newer = [one for one in checkpoints if one.created > self._checkpoint.created]
        seconds = compatibility.lost_seconds(self._context.session, self._checkpoint, newer)
        if not seconds:
            return {}
        lost = {"lost_seconds": seconds, "lost": compatibility.loss(self._checkpoint, seconds)}
        return {**lost, "damaged": [one.id for one in newer]} if newer else lost

    @contextmanager
    def _trusting(self) -> Iterator[None]:
        """A checkpoint that turns out to be damaged is refused, and the next resume takes an older one."""
        try:
            yield
        except IntegrityError as damage:
            context, damaged, name = self._context, self._checkpoint, self._context.session.name
            context.registry.mark_verified(damaged.id, 0)
            left = [one for one in context.registry.checkpoints(damaged.session) if one.verified is not None]
            hint = f"None of its checkpoints is known to be whole; look at: torpor verify {name}"
            if left:
                lost = spoken_duration(damaged.created - left[0].created)
                hint = (
                    f"Resume it again to go on from its checkpoint {left[0].id}: "
                    f"what the session did in the {lost} after that is lost."
                )
            raise IntegrityError(
                f"Session {name} is not resumed: its checkpoint {damaged.id} cannot be used. {damage.message}",
                safe="Nothing was started, and no other checkpoint was touched.",
                hint=hint,
            ) from damage

    def _lease(self) -> None:
        self._token = self._context.registry.take_lease(self._context.session.id)
        self._context.registry.note_checkpoint(self._context.operation.id, self._checkpoint.id)

    def _compatibility(self) -> None:
        context = self._context
        with self._trusting():
            self._manifest = context.store.manifest(context.session.id, self._checkpoint.id)
        verdict = compatibility.examine(context.paths, context.session, self._manifest, context.criu.version)
        verdict.require(context.session)
        self._files = FilesBack(context.paths, context.session, context.store, self._manifest, verdict)

    def _lay_out_authenticated(self) -> None:
        with self._trusting():
            self._lay_out()
        self._require_free_ports()

    def _lay_out(self) -> None:
        context, manifest = self._context, self._manifest
        read = context.store.read_into
        total = sum(found.size for name, found in manifest.objects.items() if not name.startswith(OBJECT))
        _write_images(context.scratch, manifest, read)
        memory = []
        for name, stored in manifest.objects.items():
            if name.startswith("pages/"):
                found = empty_object(name, stored.meta)
                found.ids, found.lengths = stored.ids(), stored.lengths
                memory.append(found)
        lay_out_memory(context.scratch, memory, read, lambda done: context.progress("restore", done, total))
        self._shared_memory = self._make_shared_memory()
        tree = manifest.objects["shm"]
        nodes = msgspec.msgpack.decode(tree.meta, type=list[filetree.Node])
        filetree.lay_out(self._shared_memory, nodes, tree.ids(), tree.lengths, read)

    def _make_shared_memory(self) -> Path:
        """An empty /dev/shm: of namespaces that are made now, for a tree that had none of its own."""
        context = self._context
        if not self._manifest.record.get("outside"):
            folder = context.scratch / "shm"
            folder.mkdir()
            private_mounts.tmpfs(folder, options="mode=1777")
            return folder
        folder = context.paths.session(context.session.id)
        self._home = Home(folder, context.session.caller, context.scratch, session_python())
        return self._home.shared_memory

    def _require_free_ports(self) -> None:
        taken = ports.taken((self._context.scratch / images.FILES).read_bytes())
        if taken:
            name = self._context.session.name
            raise Conflict(
                f"Session {name} is not resumed: it listened on port {', '.join(taken)}, which is in use now.",
                safe="Nothing was started.",
                hint=f"See who listens with `ss -ltnp`; when the port is free: torpor resume {name}",
            )

    def _restore_tree(self) -> None:
        context = self._context
        root = context.scratch / "root"
        root.mkdir()
        with self._trusting():
            self._made.append(self._files)
            self._files.prepare(context.scratch)
        places.guard(context.scratch, context.session.caller)
        extra = self._reattach()
        clear_exit_status(context.paths.session(context.session.id))
        self._restore = Restore(
            context.criu,
            context.scratch,
            root,
            self._shared_memory,
            deadline=deadline(self._checkpoint.bytes_logical),
            extra=extra,
            pass_fds=self._inherited,
            note=context.note,
            place=self._place,
            home=self._home,
        )
        pid = self._restore.start()
        started = procfs.start_time(pid)
        if started is None:
            raise NotFound("The restored session ended before it ran.")
        self._files.check(self._restore.root)
        affinity.bind(self._restore.root, self._manifest.record.get("affinities", {}))
        self._init = ProcessId(pid, started, procfs.boot_id())
        context.note(self._init)
        context.registry.check_lease(context.session.id, self._token)
        context.registry.update_session(
            context.session.id,
            init=self._init,
            outside=False,
            notes=tuple(self._files.notes),
            lost=self._lost().get("lost"),
        )

    def _run(self) -> None:
        """The session runs from here on: its state says so at once, so that its relay goes to work."""
        assert self._restore is not None
        assert self._init is not None
        context = self._context
        self._restore.let_go()
        self.past_return = True
        self._restore = None
        if self._window is not None:
            termios.tcsetwinsize(*self._window)  # CRIU set the size that it had; it may have been changed meanwhile
        self._close_inherited()
        init = self._init
        tell_keeper(context.paths, lambda keeper: keeper.adopt(context.session.id, init.pid, init.start_time))
        self._watch.lap("restore")
        self._version = context.registry.update_session(context.session.id, state=State.RUNNING).version

    def _answer(self) -> None:
        """Waits for a kernel's first answer to its relay. Anything else answers by running."""
        context = self._context
        session = context.registry.session(context.session.id)
        give_up = time.monotonic() + ANSWER_DEADLINE
        relay_lives = session.kind == "kernel" and time.time() - session.relay_heard < RELAY_SILENCE
        while relay_lives and session.answered < self._version and time.monotonic() < give_up:
            time.sleep(0.01)
            session = context.registry.session(context.session.id)
        self._watch.lap("answer")

    def _place(self, criu: int) -> None:
        """The session comes back into the cgroups of whoever started it."""
        gone, refused = join_cgroups(criu, self._context.session.caller.cgroups)
        if gone or refused:
            logger.warning("Session %s is not put back into its cgroups %s", self._context.session.name, gone + refused)

    def _reattach(self) -> list[str]:
        """CRIU arguments that give the session its terminal and its standard input back, held by the keeper."""
        session = self._context.session
        if session.launch.io is InputOutput.DETACHED:
            return []
        with closing(KeeperClient(self._context.paths)) as keeper:
            arguments, self._inherited, terminal = terminals.reattach(session, self._manifest.record["held"], keeper)
        if terminal is not None:
            self._window = (self._inherited[0], termios.tcgetwinsize(self._inherited[0]))
        self._context.registry.update_session(session.id, terminal=terminal)
        return arguments

    def _close_inherited(self) -> None:
        while self._inherited:
            os.close(self._inherited.pop())


def _write_images(folder: Path, manifest: Manifest, read: Callable[..., None]) -> None:
    """Writes CRIU's small images. Raises IntegrityError when a name is none that CRIU writes."""
    stored = manifest.objects["images"]
    names = msgspec.msgpack.decode(stored.meta, type=list[tuple[str, int]])
    content = memoryview(bytearray(stored.size))
    read(stored.ids(), content, stored.lengths)
    offset = 0
    outside = bool(manifest.record.get("outside"))
    for name, size in names:
        if "/" in name or not name.endswith(".img"):
            raise IntegrityError(f"The checkpoint names an image {name!r}, which CRIU does not write.")
        image = bytes(content[offset : offset + size])
        if name == images.FILES:
            image = images.rearm_timers(image)
        elif name.startswith(images.THREADS):
            image = interrupted.made_again(image)
        elif name == images.PROCESSES and outside:
            image = images.with_own_session(image)
        (folder / name).write_bytes(image)
        offset += size
