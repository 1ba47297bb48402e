"""Every other command, on a real agent: what it prints, its JSON, its exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from tests.cli.terminal import terminal
from tests.installation import Installation, eventually

from torpor.cli import COMMANDS
from torpor.errors import AgentUnreachable, Conflict, IntegrityError, NotFound, UsageError

FIELDS = {"id", "name", "state", "owner", "pids", "node", "labels", "created"}
FIELDS |= {"last_activity", "idle_seconds", "verdict", "checkpoints"}
SIZES = ("bytes_logical", "bytes_stored", "bytes_new")


def as_json(agent: Installation, *arguments: str) -> Any:
    done = agent.torpor(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_a_session_from_start_to_end(agent: Installation) -> None:
    agent.run("sh", "-c", "echo printed; sleep 1000", name="train", labels={"team": "vision"})
    agent.wait_for_output("train", "printed")

    listed = agent.torpor("ls").stdout
    assert listed.splitlines()[0].split() == ["NAME", "ID", "STATE", "IDLE", "MEMORY", "CHECKPOINTS", "COMMAND"]
    assert "train" in listed
    assert "running" in listed
    [element] = as_json(agent, "ls")
    shown = as_json(agent, "show", "train")
    for found in (element, shown):
        assert set(found) >= FIELDS
        assert found["state"] == "running"
    assert "sh -c" in agent.torpor("show", "train").stdout
    assert agent.torpor("logs", "train").stdout == "printed\n"
    assert agent.torpor("why", "train").stdout.strip()
    assert as_json(agent, "why", "train").keys() >= {"verdict", "since", "sentence", "would_change", "policy"}

    saved = as_json(agent, "checkpoint", "train")
    assert saved.keys() >= {"id", *SIZES}
    assert saved["seconds"].keys() >= {"freeze", "transfer", "durable", "verify", "total"}
    away = as_json(agent, "hibernate", "train")
    assert away["seconds"].keys() >= {"freeze", "transfer", "durable", "verify", "total"}
    assert away["bytes_new"] < saved["bytes_new"]
    assert "hibernated" in agent.torpor("ls").stdout
    assert [one["id"] for one in as_json(agent, "checkpoints", "train")] == [away["id"], saved["id"]]
    assert away["id"] in agent.torpor("checkpoints", "train").stdout
    assert as_json(agent, "verify", "train")["checkpoints"] == [away["id"], saved["id"]]
    assert f"{saved['id']} is whole." in agent.torpor("verify", saved["id"]).stdout

    back = as_json(agent, "resume", "train")
    assert back["id"] == away["id"]
    assert back["seconds"].keys() >= {"restore", "answer", "complete"}
    assert "running already" in agent.torpor("resume", "train").stdout

    refused = agent.torpor("rm", "train")
    assert refused.returncode == Conflict.exit_status
    assert refused.stderr.startswith("torpor: Session train is running.\n  Nothing was removed.\n  ")
    assert as_json(agent, "rm", "--force", "train")[0]["bytes_freed"] > 0
    assert as_json(agent, "ls") == []


def test_results_for_people(agent: Installation) -> None:
    agent.run("sleep", "1000", name="one")
    for command, word in (("checkpoint", "saved"), ("hibernate", "hibernated"), ("resume", "resumed")):
        done = agent.torpor(command, "one")
        assert done.returncode == 0
        assert f"one {word}: checkpoint c-" in done.stdout
        assert "total" in done.stdout
        assert "\x1b" not in done.stdout + done.stderr
    assert agent.torpor("rm", "--force", "one").stdout.startswith("one removed, ")


def test_a_terminal_gets_a_progress_bar(agent: Installation) -> None:
    agent.run("sleep", "1000", name="one")
    with terminal(agent, "hibernate", "one") as screen:
        assert screen.wait() == 0
        assert b"one hibernated: checkpoint" in screen.seen
        assert b"\x1b[" in screen.seen


def test_logs_are_followed(agent: Installation) -> None:
    agent.run("sh", "-c", "echo first; read line < /dev/null; sleep 0.3; echo last", name="one")
    assert agent.torpor("logs", "-f", "one").stdout == "first\nlast\n"


def test_standard_error_has_a_log_of_its_own(agent: Installation) -> None:
    agent.torpor("run", "--name", "one", "--", "sh", "-c", "echo out; echo err >&2")
    assert agent.torpor("logs", "one").stdout == "out\n"
    assert agent.torpor("logs", "--stderr", "one").stdout == "err\n"


def test_errors_have_their_status_and_their_json(agent: Installation) -> None:
    for command in ("show", "logs", "checkpoint", "hibernate", "resume", "checkpoints", "verify", "why", "rm"):
        done = agent.torpor(command, "nobody")
        assert done.returncode == NotFound.exit_status, command
        assert done.stdout == ""
        assert done.stderr.startswith("torpor: You have no session")
    done = agent.torpor("show", "nobody", "--json")
    told = json.loads(done.stderr)
    assert (told["error"]["code"], told["exit_status"], done.stdout) == ("not_found", NotFound.exit_status, "")
    assert agent.torpor("fly").returncode == UsageError.exit_status
    assert agent.torpor("show").returncode == UsageError.exit_status


def test_damage_has_its_status(agent: Installation) -> None:
    agent.run("sleep", "1000", name="one")
    saved = agent.operate("one", "checkpoint")
    [manifest] = [path for path in (agent.paths.store / "manifests").rglob("*") if path.is_file()]
    manifest.write_bytes(manifest.read_bytes()[:-1] + b"x")
    done = agent.torpor("verify", saved["id"])
    assert done.returncode == IntegrityError.exit_status
    assert "Traceback" not in done.stderr


def test_without_an_agent_every_command_says_so(make_installation: Any) -> None:
    done = make_installation().torpor("ls")
    assert done.returncode == AgentUnreachable.exit_status
    assert "torpor up" in done.stderr


def test_a_reader_may_go(shared_agent: Installation) -> None:
    shared_agent.run("sh", "-c", "yes | head -c 4000000", name="one")
    eventually(lambda: shared_agent.client.session("one")["state"], lambda state: state == "ended")
    script = f"{sys.executable} -m torpor logs one | head -1"
    done = subprocess.run(
        ["bash", "-c", script], env=shared_agent.environment, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("y\n", "")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(make_installation: Any, command: str) -> None:
    done = make_installation().torpor(command, "--help")
    assert done.returncode == 0
    assert "Example" in done.stdout or "Commands" in done.stdout, done.stdout


def test_the_overview_names_every_command_and_the_exit_statuses(make_installation: Any) -> None:
    shown = make_installation().torpor("--help").stdout
    assert all(f"  {command} " in shown for command in COMMANDS)
    assert "Exit status" in shown


@pytest.mark.parametrize("arguments", [["--help"], ["ls"], ["run", "--help"], ["why", "x"]])
def test_simple_commands_import_nothing_heavy(make_installation: Any, arguments: list[str]) -> None:
    heavy = ["starlette", "uvicorn", "rich", "asyncio", "msgspec", "jupyter_client", "zmq", "torpor.agent", "sqlite3"]
    probe = (
        "import sys; from torpor.cli import run; run(sys.argv[1:]); "
        f"sys.stdout.flush(); print([name for name in {heavy} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe, *arguments],
        env=make_installation().environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.splitlines()[-1] == "[]"
