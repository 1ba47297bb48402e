"""The idle timer of a real agent on real sessions."""

from __future__ import annotations

from tests.installation import PYTHON, Installation, eventually

from torpor.client import Json

SLEEPS = ("sleep", "1000")
COMPUTES = """
import time
while True:
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    time.sleep(0.1)
"""


def why(agent: Installation, ref: str, verdict: str) -> Json:
    return eventually(lambda: agent.client.why(ref), lambda told: told["verdict"] == verdict)


def test_an_idle_command_with_a_limit_of_its_own_is_hibernated_while_one_that_computes_runs_on(
    shared_agent: Installation,
) -> None:
    computes = shared_agent.run(PYTHON, "-c", COMPUTES, idle_after=2.0)
    sleeps = shared_agent.run(*SLEEPS, idle_after=2.0)
    shared_agent.wait_for_state(sleeps["id"], "hibernated")
    assert shared_agent.client.session(computes["id"])["state"] == "running"
    assert "of a core over the last" in why(shared_agent, computes["id"], "busy")["sentence"]


def test_a_terminal_is_judged_by_its_last_use(shared_agent: Installation) -> None:
    shared_agent.paths.config.write_text('[policy]\ncpu_window = "1s"\n')
    shell = shared_agent.run("/bin/sh", io="terminal")
    told = why(shared_agent, shell["id"], "idle")
    assert "its terminal was last used" in told["sentence"]
    assert "after 30 min of idleness" in told["would_change"]


def test_a_command_that_nothing_wakes_can_be_left_alone_and_why_says_so(shared_agent: Installation) -> None:
    shared_agent.paths.config.write_text('[policy]\nidle_after = "1s"\nunattended = "none"\n')
    command = shared_agent.run(*SLEEPS, name="left-alone")
    sibling = shared_agent.run(*SLEEPS, idle_after=2.0)
    shared_agent.wait_for_state(sibling["id"], "hibernated")
    why(shared_agent, command["id"], "idle")
    told = shared_agent.torpor("why", "left-alone")
    assert told.stdout.startswith("Idle for ")
    assert "its processes used 0.000 of a core" in told.stdout
    assert "left alone without --idle-after" in told.stdout


def test_the_policy_is_read_again_and_a_mistake_in_it_is_told(agent: Installation) -> None:
    agent.paths.config.write_text('[policy]\nidle_after = "1s"\naction = "none"\n')
    first = agent.run(*SLEEPS, name="first")
    assert "does nothing" in why(agent, "first", "idle")["would_change"]
    agent.paths.config.write_text('[policy]\nidle_after = "soon"\n')
    told = agent.torpor("why", "first")
    assert "policy.idle_after is wrong: 'soon' is not a duration" in told.stderr
    assert agent.client.session(first["id"])["state"] == "running"
    agent.paths.config.write_text('[policy]\nidle_after = "1s"\n')
    agent.wait_for_state(first["id"], "hibernated")
