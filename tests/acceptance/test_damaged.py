"""What is stored is believed only when it is what was written: refused loudly, and older checkpoints stay usable."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.acceptance.traces import assert_as_before, traces
from tests.installation import PYTHON, Installation, eventually

from torpor.errors import IntegrityError, NewerFormat, TorporError
from torpor.store import Store

GROWING = """
import os, time
kept, number = [], 0
while True:
    number += 1
    kept.append(os.urandom(1 << 16))
    print(number, flush=True)
    time.sleep(0.05)
"""
FORMAT_OFFSET = 8  # of a manifest: after its magic
KEY_ID_OFFSET = 12


class Twice:
    """A session with a checkpoint, and then hibernated; `packs` are those of the hibernation alone."""

    def __init__(self, agent: Installation) -> None:
        self.agent = agent
        self.session = agent.run(PYTHON, "-c", GROWING, name="twice")
        agent.wait_for_output("twice", "5\n")
        self.least = agent.output("twice").count("\n")  # numbers printed before the first checkpoint, and after it
        self.old: str = agent.operate("twice", "checkpoint")["id"]
        before = self._packs()
        self.seen = agent.output("twice").count("\n")
        agent.wait_for_output("twice", f"\n{self.seen + 5}\n")
        self.new: str = agent.operate("twice", "hibernate")["id"]
        self.packs = self._packs() - before

    def manifest(self, checkpoint: str) -> Path:
        (found,) = self.agent.paths.store.glob(f"manifests/**/{checkpoint}*")
        return found

    def _packs(self) -> set[Path]:
        return set((self.agent.paths.store / "packs").iterdir())


@pytest.fixture
def twice(shared_agent: Installation) -> Iterator[Twice]:
    made = Twice(shared_agent)
    yield made
    shared_agent.client.remove("twice", force=True)


def change(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b", buffering=0) as file:
        file.seek(offset)
        file.write(content)
        os.fsync(file.fileno())


def damage_a_chunk(twice: Twice) -> None:
    """A byte of memory that only the newest checkpoint has."""
    pack = max(twice.packs, key=lambda path: path.stat().st_size)
    offset = 4096 + (1 << 18)
    (byte,) = pack.read_bytes()[offset : offset + 1]
    change(pack, offset, bytes([byte ^ 1]))


def damage_the_manifest(twice: Twice) -> None:
    path = twice.manifest(twice.new)
    middle = path.stat().st_size // 2
    change(path, middle, bytes([path.read_bytes()[middle] ^ 1]))


def cut_the_manifest(twice: Twice) -> None:
    os.truncate(twice.manifest(twice.new), 100)


def lose_a_pack(twice: Twice) -> None:
    for pack in twice.packs:
        pack.unlink()


def foreign_manifest(twice: Twice) -> None:
    """What another site wrote under this name."""
    change(twice.manifest(twice.new), KEY_ID_OFFSET, b"\x55" * 8)


DAMAGES: dict[Callable[[Twice], None], str] = {
    damage_a_chunk: "damaged",
    damage_the_manifest: "its signature does not match",
    cut_the_manifest: "is damaged",
    lose_a_pack: "chunk",
    foreign_manifest: "another site's key",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_refused_and_the_older_one_is_usable(
    twice: Twice, damage: Callable[[Twice], None]
) -> None:
    agent = twice.agent
    damage(twice)
    before = traces(agent)
    refused = agent.torpor("resume", "twice", "--json")
    assert refused.returncode == IntegrityError.exit_status
    error = json.loads(refused.stderr)["error"]
    assert error["code"] == "integrity"
    assert twice.new in error["message"]
    assert DAMAGES[damage] in error["message"]
    assert twice.old in error["hint"]
    assert "is lost" in error["hint"]
    found = agent.client.session("twice")
    assert (found["state"], found["pids"], found["error"]["code"]) == ("hibernated", [], "integrity")
    assert_as_before(agent, before)
    assert [one["verified"] is not None for one in agent.client.checkpoints("twice")] == [False, True]

    printed = agent.output("twice").splitlines()
    resumed = agent.torpor("resume", "twice")
    assert resumed.returncode == 0
    assert "is lost" in resumed.stdout
    assert twice.new in resumed.stdout
    lines = eventually(lambda: agent.output("twice").splitlines(), lambda lines: len(lines) > len(printed))
    assert lines[: len(printed)] == printed
    assert twice.least < int(lines[len(printed)]) <= twice.seen + 1 < int(printed[-1])


def test_verify_finds_the_damage_first_and_resume_takes_the_older_one(twice: Twice) -> None:
    agent = twice.agent
    damage_a_chunk(twice)
    verified = agent.torpor("verify", twice.new, "--json")
    assert verified.returncode == IntegrityError.exit_status
    assert agent.torpor("verify", twice.old).returncode == 0
    result = agent.operate("twice", "resume")
    assert (result["id"], result["damaged"]) == (twice.old, [twice.new])
    assert result["lost_seconds"] > 0


def test_when_every_checkpoint_is_damaged_it_is_said_and_nothing_is_removed(twice: Twice) -> None:
    agent = twice.agent
    contents = {path: path.read_bytes() for path in map(twice.manifest, (twice.new, twice.old))}
    for path in contents:
        change(path, 100, b"damage")
    for _ in range(2):
        with pytest.raises(IntegrityError):
            agent.operate("twice", "resume")
    with pytest.raises(TorporError, match="no verified checkpoint"):
        agent.operate("twice", "resume")
    assert agent.client.session("twice")["state"] == "hibernated"
    for path, content in contents.items():
        path.write_bytes(content)
    assert agent.torpor("verify", "twice").returncode == 0
    assert agent.operate("twice", "resume")["id"] == twice.new


def test_a_manifest_of_a_newer_format_is_refused_and_not_given_up(twice: Twice) -> None:
    path = twice.manifest(twice.new)
    content = path.read_bytes()
    change(path, FORMAT_OFFSET, struct.pack("<I", 99))
    with pytest.raises(NewerFormat, match="format 99"):
        twice.agent.operate("twice", "resume")
    path.write_bytes(content)
    assert twice.agent.operate("twice", "resume")["id"] == twice.new


def test_a_store_of_a_newer_format_or_another_site_is_refused(twice: Twice) -> None:
    """The agent goes on serving; a resume says what is wrong, and works when it is right again."""
    agent = twice.agent
    description = agent.paths.store / "format"
    content = description.read_bytes()
    key = agent.paths.site_key.read_bytes()
    agent.paths.site_key.write_bytes(bytes(32))
    with pytest.raises(IntegrityError, match="key"):
        agent.operate("twice", "resume")
    agent.paths.site_key.write_bytes(key)
    description.write_bytes(content.replace(b'"format": 1', b'"format": 9'))
    with pytest.raises(NewerFormat, match="format 9"):
        agent.operate("twice", "resume")
    description.write_bytes(content)
    assert agent.client.session("twice")["state"] == "hibernated"
    assert agent.operate("twice", "resume")["id"] == twice.new
    assert Store.open(agent.paths.store, key).manifests(twice.session["id"])
