"""`torpor resume --dry-run` says everything that stands against a resume, at once, and changes nothing."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from tests.installation import PYTHON, Installation
from tests.sessions.altered import alter

from torpor.errors import Incompatible
from torpor.store import Manifest

HOLDER = """
import os, sys, time
os.chdir(sys.argv[1])
opened = open("data", "r+")
print("ready", flush=True)
while True:
    time.sleep(0.1)
"""
Host = dict[str, Any]


def asleep(agent: Installation) -> Path:
    """A hibernated session `held`; the folder in which it works, with its file `data`."""
    folder = agent.home / "work"
    folder.mkdir()
    (folder / "data").write_text("content")
    agent.run(PYTHON, "-c", HOLDER, str(folder), name="held")
    agent.wait_for_output("held", "ready")
    agent.operate("held", "hibernate")
    return folder


def alter_host(agent: Installation, **changes: Any) -> None:
    session = agent.client.session("held")["id"]
    alter(agent.paths, session, lambda manifest: manifest.record["host"].update(changes))


def everything(agent: Installation) -> list[tuple[str, int, int]]:
    """Names, sizes and times of all files that belong to the installation or the session, the agent's log apart."""
    found = []
    for folder, _, names in os.walk(agent.home):
        for name in names:
            facts = os.stat(Path(folder, name))
            if name != "agent.log" and not name.startswith(("torpor.db", "index")):
                found.append((str(Path(folder, name)), facts.st_size, facts.st_mtime_ns))
    return sorted(found)


def test_nothing_stands_against_it(agent: Installation) -> None:
    asleep(agent)
    before, session = everything(agent), agent.client.session("held")
    done = agent.torpor("resume", "held", "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("held can be resumed here from checkpoint c-")
    told = json.loads(agent.torpor("resume", "held", "--dry-run", "--json").stdout)
    assert (told["compatible"], told["reasons"], told["notes"], told["lost_seconds"]) == (True, [], [], 0)
    after = agent.client.session("held")
    assert everything(agent) == before
    assert (after["state"], after["version"], after["lease"]) == ("hibernated", session["version"], session["lease"])


def test_every_reason_is_told_at_once_and_the_resume_says_the_same(agent: Installation) -> None:
    folder = asleep(agent)
    host: Host = {}
    session = agent.client.session("held")["id"]
    alter(agent.paths, session, lambda manifest: host.update(manifest.record["host"]))
    alter_host(
        agent,
        cpu_model="Some Other Processor",
        cpu_flags=[*host["cpu_flags"], "hexadecimal"],
        kernel="99.1.0",
        criu=[9, 0, 0],
        architecture="m68k",
    )
    (folder / "data").unlink()
    folder.rename(folder.with_name("elsewhere"))
    wanted = [
        "It was saved on m68k; this node is",
        "Its processor (Some Other Processor) has features that this one",
        "lacks: hexadecimal.",
        "It was saved under Linux 99.1.0",
        "It was saved by CRIU 9.0.0",
        f"The folder {folder}, which the session works in or has open, is gone.",
        f"{folder / 'data'} cannot be made again: its folder is gone",
    ]
    before = everything(agent)
    done = agent.torpor("resume", "held", "--dry-run")
    assert done.returncode == 7
    assert done.stdout.startswith("held cannot be resumed here from checkpoint c-")
    assert [sentence for sentence in wanted if sentence not in done.stdout] == []
    with pytest.raises(Incompatible) as refused:
        agent.operate("held", "resume")
    assert [sentence for sentence in wanted if sentence not in refused.value.message] == []
    assert agent.torpor("resume", "held").returncode == 7
    assert agent.client.session("held")["state"] == "hibernated"
    assert {one[0] for one in everything(agent)} == {one[0] for one in before}


def test_another_processor_that_can_all_that_this_one_can_is_none(agent: Installation) -> None:
    asleep(agent)
    alter_host(agent, cpu_model="Some Other Processor", cpu_flags=["fpu"])
    assert agent.client.compatibility("held")["compatible"]
    agent.operate("held", "resume")


def test_the_host_has_another_name(agent: Installation) -> None:
    asleep(agent)
    alter_host(agent, node="the-old-name")
    note = f"The node was called the-old-name and is called {os.uname().nodename} now."
    assert note in agent.torpor("resume", "held", "--dry-run").stdout
    assert agent.operate("held", "resume")["notes"] == [note]
    assert note in agent.torpor("show", "held").stdout


def test_there_is_less_memory_than_it_needs(agent: Installation) -> None:
    asleep(agent)
    session = agent.client.session("held")["id"]
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def enlarge(manifest: Manifest) -> None:
        memory = next(found for name, found in manifest.objects.items() if name.startswith("pages/"))
        times = total // memory.size + 1
        memory.size, memory.chunks, memory.lengths = memory.size * times, memory.chunks * times, memory.lengths * times

    alter(agent.paths, session, enlarge)
    (reason,) = agent.client.compatibility("held")["reasons"]
    assert int(reason.removeprefix("It needs ").split()[0]) > total >> 20
    assert "MiB of memory; this node has" in reason
    assert reason.endswith(" MiB available.")
    with pytest.raises(Incompatible, match="MiB of memory"):
        agent.operate("held", "resume")


def test_what_somebody_else_changed_is_told_before_it_is_copied(agent: Installation) -> None:
    folder = asleep(agent)
    (folder / "data").write_text("theirs")
    shown = agent.torpor("resume", "held", "--dry-run").stdout
    assert f"{folder / 'data'} was changed by somebody else" in shown
    assert os.listdir(folder) == ["data"]
    agent.operate("held", "resume")
    assert len(os.listdir(folder)) == 2
    assert "note:" in agent.torpor("show", "held").stdout


LISTENER = """
import socket, time
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
while True:
    time.sleep(0.1)
"""


def test_a_port_that_is_taken_is_told(agent: Installation) -> None:
    agent.run(PYTHON, "-c", LISTENER, name="held")
    port = int(agent.wait_for_output("held", "\n"))
    agent.operate("held", "hibernate")
    with socket.create_server(("127.0.0.1", port)):
        (reason,) = agent.client.compatibility("held")["reasons"]
        assert reason == f"It listened on port {port} of 127.0.0.1, which is in use now."
    assert agent.client.compatibility("held")["compatible"]


def test_a_running_session_has_nothing_to_rehearse(agent: Installation) -> None:
    agent.run("sleep", "1000", name="held")
    done = agent.torpor("resume", "held", "--dry-run")
    assert done.returncode == 5
    assert "there is nothing to resume" in done.stderr
