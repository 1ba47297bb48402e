"""Names, arguments, labels and messages of others on anybody's terminal: shown, never obeyed."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from typing import Any

import pytest
from tests.installation import Installation

from torpor.logs import PlainFormatter
from torpor.text import json_escaped, shown, shown_lines

HOSTILE = "\x1b]0;owned\x07\x1b[2J\n\r\x9b31m\u202eevil\u2066\u200b\u2028\x7f\udcff"
SPELLED = r"\x1b]0;owned\x07\x1b[2J\n\r\x9b31m\u202eevil\u2066\u200b\u2028\x7f\udcff"
SENDABLE = HOSTILE[:-1]  # a lone surrogate crosses no wire


def is_harmless(text: str) -> bool:
    return all(one.isprintable() or one == "\n" for one in text)


def test_what_cannot_be_seen_is_spelled_out() -> None:
    assert shown(HOSTILE) == SPELLED
    assert shown("naïve 数据 — “q” 😀") == "naïve 数据 — “q” 😀"
    assert shown_lines("a\tb\nc\x1b[2J\r\n") == "a\tb\nc\\x1b[2J\\r\n"


def test_json_stays_the_same_document() -> None:
    value = {"name": HOSTILE + "\U000e0041", "other": ["naïve", 1]}
    document = json_escaped(json.dumps(value, indent=2, ensure_ascii=False))
    assert is_harmless(document)
    assert "naïve" in document
    assert json.loads(document) == value


def test_a_message_is_one_line_of_the_log() -> None:
    record = logging.LogRecord("n", logging.ERROR, "f", 1, "Session %s: %s", (HOSTILE, "x"), None)
    assert PlainFormatter("%(levelname)s %(message)s").format(record) == f"ERROR Session {SPELLED}: x"
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        record.exc_info = sys.exc_info()
    text = PlainFormatter("%(message)s").format(record)
    assert is_harmless(text)
    assert text.startswith(f"Session {SPELLED}: x\nTraceback (most recent call last):\n  File ")


@pytest.fixture
def hostile(agent: Installation) -> dict[str, Any]:
    """A session whose owner wrote into everything what they could."""
    code = "import sys; sys.stdout.write(sys.argv[1]); sys.stdout.flush(); input()"
    argv = [sys.executable, "-c", code, SENDABLE]
    session = agent.client.create_session(
        argv, cwd="/", env={"PATH": os.environ["PATH"]}, name="odd", labels={"note": SENDABLE}, io="terminal"
    )
    agent.wait_for_output("odd", "evil")
    return session


def test_commands_show_and_never_obey(agent: Installation, hostile: dict[str, Any]) -> None:
    with agent.registry() as registry:
        registry.update_session(
            hostile["id"], error={"code": "engine", "message": HOSTILE[:-1], "safe": "", "hint": ""}, notes=(SENDABLE,)
        )
    for command in (
        ("ls",),
        ("show", "odd"),
        ("why", "odd"),
        ("checkpoints", "odd"),
        ("show", SENDABLE),
        ("hibernate", SENDABLE),
        ("ls", "--json"),
        ("show", "odd", "--json"),
        ("show", SENDABLE, "--json"),
    ):
        done = agent.torpor(*command)
        assert is_harmless(done.stdout + done.stderr), command
    assert SPELLED[:-6] in agent.torpor("show", "odd").stdout
    assert json.loads(agent.torpor("show", "odd", "--json").stdout)["labels"]["note"] == SENDABLE
    assert len(agent.torpor("ls").stdout.splitlines()) == 2


def test_logs_of_the_agent_are_harmless(agent: Installation, hostile: dict[str, Any]) -> None:
    with agent.registry() as registry:
        registry.update_session(hostile["id"], name=SENDABLE)
    agent.kill()
    agent.start()
    agent.client.end(hostile["id"], keep=False)
    assert f"Session {SPELLED[:-6]} ended" in agent.log
    assert is_harmless(agent.log)


def test_the_output_of_others_does_not_command_a_terminal(agent: Installation, hostile: dict[str, Any]) -> None:
    with agent.registry() as registry:
        registry.update_session(hostile["id"], uid=54321)
    raw = agent.torpor("logs", "odd").stdout
    assert "\x1b[2J" in raw
    terminal = subprocess.run(
        ["script", "-qec", f"{sys.executable} -m torpor logs odd", "/dev/null"],
        env=agent.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
    )
    text = terminal.stdout.decode().replace("\r\n", "\n")
    assert r"\x1b[2J" in text
    assert is_harmless(text)
