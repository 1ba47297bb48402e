"""The relay's parts by themselves."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from jupyter_client.session import Session

from torpor.errors import NotPermitted, UsageError
from torpor.jupyter import ledger as ledgers
from torpor.jupyter.agent_link import Progress
from torpor.jupyter.claim import Claim, Predecessor
from torpor.jupyter.connection import CHANNELS, Connection, private_folder
from torpor.jupyter.held import Held, HeldRequests, notice_text
from torpor.jupyter.ledger import Ledger
from torpor.jupyter.memory import Memory
from torpor.jupyter.policy import CommJudge, Effect, effect
from torpor.jupyter.wire import Author, Message, Signer
from torpor.model import State

KEY = b"a key"
OUTER = Connection({"key": "a key", "ip": "127.0.0.1", **{f"{channel}_port": 5 for channel in CHANNELS}})


def message(msg_type: str, content: dict[str, Any] | None = None, *, key: bytes = KEY) -> Message:
    """A message as jupyter_client writes it."""
    session = Session(key=key)
    frames = session.serialize(session.msg(msg_type, content or {}), ident=[b"client", b"more"])
    parsed = Message.parse([zmq.Frame(frame) for frame in frames])
    assert parsed is not None
    return parsed


@given(st.lists(st.binary(max_size=20), max_size=10))
def test_frames_that_are_no_message_are_none(frames: list[bytes]) -> None:
    assert Message.parse([zmq.Frame(frame) for frame in frames]) is None


@given(st.lists(st.binary(max_size=12), min_size=4, max_size=6))
def test_damaged_parts_are_none_or_a_message(parts: list[bytes]) -> None:
    parsed = Message.parse([zmq.Frame(frame) for frame in (b"id", b"<IDS|MSG>", b"", *parts)])
    assert parsed is None or parsed.identities == [b"id"]


def test_signatures_are_those_of_jupyter_client() -> None:
    signer = Signer(KEY, "hmac-sha256")
    assert signer.trusts(message("execute_request", {"code": "1"}))
    assert not signer.trusts(message("execute_request", {"code": "1"}, key=b"another"))
    request = message("kernel_info_request")
    frames = Author(signer).compose("kernel_info_reply", {"status": "ok"}, request.raw_header)
    received = Session(key=KEY).deserialize(frames[1:])
    assert received["parent_header"]["msg_id"] == request.header.msg_id
    with pytest.raises(UsageError, match="md-nonsense"):
        Signer(KEY, "md-nonsense")


def test_a_message_that_may_have_come_before_is_not_refused() -> None:
    client = Session(key=KEY)
    session = Session(key=KEY)
    sent = [*session.serialize(session.msg("stream", {"text": "x"}), ident=[b"topic"]), b"a buffer"]
    parsed = Message.parse([zmq.Frame(frame) for frame in sent])
    assert parsed is not None
    repeated = [frame.bytes for frame in Author(Signer(KEY, "hmac-sha256")).again(parsed)]
    for frames in (sent, repeated):
        identities, rest = client.feed_identities(frames)
        message = client.deserialize(rest)
        assert (identities, message["content"], message["buffers"]) == ([b"topic"], {"text": "x"}, [b"a buffer"])


def test_without_a_key_nothing_is_signed() -> None:
    signer = Signer(b"", "hmac-sha256")
    assert Author(signer).compose("status", {})[1] == b""
    assert signer.trusts(message("execute_request", key=b"any"))


@pytest.mark.parametrize(
    ("msg_type", "content", "expected"),
    [
        ("execute_request", {"code": ""}, Effect.WAKE),
        ("input_reply", {"value": ""}, Effect.WAKE),
        ("something_new_request", {}, Effect.WAKE),
        ("comm_open", {"comm_id": "a", "target_name": "jupyter.widget"}, Effect.WAKE),
        ("comm_open", {"comm_id": "a", "target_name": "jupyter.widget.control"}, Effect.HOLD),
        ("comm_msg", {"comm_id": "a", "data": {"method": "request_states"}}, Effect.HOLD),
        ("comm_msg", {"comm_id": "a", "data": {"method": ["request_state"]}}, Effect.WAKE),
        ("comm_msg", {"comm_id": "a", "data": "text"}, Effect.WAKE),
        ("comm_close", {"comm_id": "a"}, Effect.WAKE),
        ("debug_request", {"command": "debugInfo"}, Effect.ANSWER),
        ("debug_request", {"command": "evaluate"}, Effect.WAKE),
        ("kernel_info_request", {}, Effect.ANSWER),
        ("shutdown_request", {"restart": True}, Effect.SHUTDOWN),
        ("interrupt_request", {}, Effect.INTERRUPT),
    ],
)
def test_what_wakes(msg_type: str, content: dict[str, Any], expected: Effect) -> None:
    assert effect(message(msg_type, content), CommJudge()) is expected


def test_all_that_a_page_says_on_its_control_comm_is_a_question() -> None:
    judge = CommJudge()
    talk = [
        ("comm_open", {"comm_id": "c", "target_name": "jupyter.widget.control"}),
        ("comm_msg", {"comm_id": "c", "data": {"method": "whatever"}}),
        ("comm_close", {"comm_id": "c"}),
    ]
    assert [judge.is_activity(message(*words)) for words in talk] == [False] * 3
    assert judge.is_activity(message("comm_close", {"comm_id": "c"}))


def test_a_request_that_the_kernel_does_not_know_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger()
    ledger.connected()
    request = message("nonsense_request")
    ledger.forwarded("shell", request)
    ledger.published(request.header.msg_id, "busy")
    ledger.published(request.header.msg_id, "idle")
    assert ledger.in_flight == 1
    monkeypatch.setattr(ledgers, "REPLY_GRACE", -1.0)
    assert ledger.in_flight == 0


def test_a_kernel_is_busy_until_reply_and_idle_status() -> None:
    ledger = Ledger()
    assert ledger.report(0).execution_state == "starting"
    ledger.connected()
    assert ledger.report(0).execution_state == "idle"
    request = message("execute_request", {"code": ""})
    ledger.forwarded("shell", request)
    ledger.published(request.header.msg_id, "busy")
    assert (ledger.report(2).execution_state, ledger.report(2).queued) == ("busy", 3)
    assert ledger.replied(request.header.msg_id) is request
    assert ledger.report(0).execution_state == "busy"
    ledger.published(request.header.msg_id, "idle")
    assert ledger.report(0).execution_state == "idle"
    since = ledger.report(0).since
    time.sleep(0.01)
    assert ledger.report(0).since == since


def test_held_requests_are_taken_in_order() -> None:
    held = HeldRequests()
    names = ["comm_info_request", "execute_request", "complete_request", "execute_request"]
    for name in names:
        held.add(Held("shell", message(name), wakes=name != "comm_info_request"))
    assert [one.message.header.msg_type for one in held.take(lambda one: one.is_cell)] == ["execute_request"] * 2
    assert held.wakes()
    assert [one.message.header.msg_type for one in held.take()] == ["comm_info_request", "complete_request"]
    assert len(held) == 0


@pytest.mark.parametrize(
    ("state", "progress", "reachable", "expected"),
    [
        (State.RESUMING, None, True, "Waking this session…"),
        (State.RESUMING, Progress("memory", 1_000, 2_000_000_000), True, "Waking this session: 2.00 GB, 0 % (memory)"),
        (State.RESUMING, Progress("memory", 999_000, 999_000), True, "Waking this session: 999 kB, 100 % (memory)"),
        (State.HIBERNATING, None, True, "This session is just being put to sleep. It wakes for this cell right after."),
        (State.HIBERNATED, None, False, "Torpor's agent does not answer. This cell runs as soon as it is back."),
    ],
)
def test_the_notice(state: State, progress: Progress | None, reachable: bool, expected: str) -> None:
    assert notice_text(state, progress, reachable=reachable) == expected


def test_memory_outlives_the_relay(tmp_path: Path) -> None:
    memory = Memory(tmp_path / "memory.json", OUTER)
    memory.learn(message("kernel_info_reply", {"status": "ok", "implementation": "x"}))
    memory.learn(message("comm_info_reply", {"status": "ok", "comms": {"a": {"target_name": "t"}}}), all_comms=True)
    memory.learn(message("kernel_info_reply", {"status": "error"}))
    memory.save()
    assert (tmp_path / "memory.json").stat().st_mode & 0o777 == 0o600
    later = Memory(tmp_path / "memory.json", OUTER)
    assert later.answer(message("kernel_info_request")) is None
    later.load()
    assert later.answer(message("kernel_info_request")) == (
        "kernel_info_reply",
        {"status": "ok", "implementation": "x"},
    )
    found = later.answer(message("comm_info_request", {"target_name": "u"}))
    assert found == ("comm_info_reply", {"status": "ok", "comms": {}})
    (tmp_path / "memory.json").write_text("{")
    later.load()
    assert not later.knows_kernel


def test_inner_connections_are_apart_from_each_other() -> None:
    one, two = OUTER.inner(), OUTER.inner()
    assert one.ip.startswith("127.")
    assert one.ip != two.ip
    assert len({one.port(channel) for channel in CHANNELS}) == len(CHANNELS)
    assert one.key == KEY
    assert one.curve is None


def test_an_encrypted_connection_has_an_encrypted_inner_one_with_other_keys() -> None:
    public, secret = zmq.curve_keypair()
    outer = Connection({**OUTER.facts, "curve_publickey": public.decode(), "curve_secretkey": secret.decode()})
    assert outer.curve == (public, secret)
    inner = outer.inner()
    assert inner.curve is not None
    assert inner.curve[0] != public


@pytest.mark.parametrize("content", ["", "[]", '{"transport": "udp"}'])
def test_what_is_no_connection_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "k.json").write_text(content)
    with pytest.raises(UsageError):
        Connection.read(tmp_path / "k.json")


def test_a_connection_file_is_written_for_its_owner_only(tmp_path: Path) -> None:
    OUTER.write(tmp_path / "k.json")
    assert (tmp_path / "k.json").stat().st_mode & 0o777 == 0o600
    assert json.loads((tmp_path / "k.json").read_text()) == OUTER.facts


def test_a_folder_that_others_may_read_is_not_used(tmp_path: Path) -> None:
    folder = private_folder(tmp_path / "k.json")
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    with pytest.raises(NotPermitted):
        private_folder(tmp_path / "k.json")
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    os.symlink(tmp_path / "elsewhere", folder)
    with pytest.raises(NotPermitted):
        private_folder(tmp_path / "k.json")


def test_a_claim_tells_the_next_relay(tmp_path: Path) -> None:
    with Claim(tmp_path / "k.json") as claim:
        assert claim.predecessor() is None
        claim.record("s1")
        claim.mark_interrupted(True)
    with Claim(tmp_path / "k.json") as claim:
        assert claim.predecessor() == Predecessor("s1", interrupted=True)
        claim.remove()
    with Claim(tmp_path / "k.json") as claim:
        assert claim.predecessor() is None
