"""Whatever is done to a store, in whatever order, it behaves as a dictionary of checkpoints would."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.store import shelf
from tests.store.shelf import KEY, PAGE, noise, save

from torpor.store import Store

CHUNKS = [noise(PAGE, seed) for seed in range(6)] + [bytes(PAGE)]


def an_object(chunks: list[int], rest: bytes) -> bytes:
    return b"".join(CHUNKS[number] for number in chunks) + rest


objects = st.builds(an_object, st.lists(st.integers(0, len(CHUNKS) - 1), max_size=8), st.binary(max_size=50))
contents = st.dictionaries(st.sampled_from(["pages/1", "pages/2", "image"]), objects, max_size=3)
sessions = st.sampled_from(["a", "b"])


class AnyHistory(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.parent = Path(tempfile.mkdtemp(prefix="torpor-model-"))
        self.folder = self.parent / "store"
        self.store = Store.open(self.folder, KEY, create=True)
        self.expected: dict[tuple[str, str], dict[str, bytes]] = {}
        self.made = 0

    @rule(session=sessions, holds=contents)
    def commit(self, session: str, holds: dict[str, bytes]) -> None:
        self.made += 1
        save(self.store, session, f"c{self.made}", holds, chunk=PAGE)
        self.expected[session, f"c{self.made}"] = holds

    @rule(holds=contents, sealed=st.booleans())
    def abort(self, holds: dict[str, bytes], sealed: bool) -> None:
        with self.store.writer() as writer:
            for data in holds.values():
                shelf.put(writer, data, PAGE)
            if sealed:
                writer.seal()

    @rule(first=contents, second=contents)
    def commit_two_at_once(self, first: dict[str, bytes], second: dict[str, bytes]) -> None:
        with self.store.writer() as one, self.store.writer() as other:
            for writer, holds in ((one, first), (other, second)):
                self.made += 1
                things = {name: shelf.put(writer, data, PAGE) for name, data in holds.items()}
                writer.seal()
                writer.commit(shelf.manifest(self.store, "a", f"c{self.made}", things))
                self.expected["a", f"c{self.made}"] = holds

    @precondition(lambda self: self.expected)
    @rule(which=st.integers(0, 1 << 16))
    def delete(self, which: int) -> None:
        key = sorted(self.expected)[which % len(self.expected)]
        self.store.delete(*key)
        del self.expected[key]

    @rule()
    def collect(self) -> None:
        self.store.collect()
        if not any(any(holds.values()) for holds in self.expected.values()):
            assert shelf.packs(self.folder) == []
        assert self.store.collect() == 0

    @rule(forget=st.booleans())
    def reopen(self, forget: bool) -> None:
        self.store.close()
        if forget:
            shelf.forget_index(self.folder)
        self.store = Store.open(self.folder, KEY)

    @invariant()
    def holds_what_it_should(self) -> None:
        assert self.store.manifests() == sorted(self.expected)
        for key, holds in self.expected.items():
            assert shelf.load(self.store, *key) == holds
            self.store.verify(self.store.manifest(*key))
        assert shelf.incoming(self.folder) == []

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.parent)


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(deadline=None, max_examples=30, stateful_step_count=15)
