"""The policy file: what it says, where its mistakes are, and that it is read again when it changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from torpor.errors import UsageError
from torpor.idle.policy import Policy, PolicyFile, parse_policy


def test_without_a_file_sessions_hibernate_after_half_an_hour(tmp_path: Path) -> None:
    policy = PolicyFile(tmp_path / "config.toml").current()
    assert policy == Policy()
    assert (policy.idle_after, policy.action) == (1800.0, "hibernate")


def test_every_key_is_read() -> None:
    text = """
    [policy]
    idle_after = "2h"
    action = "none"
    unattended = "hibernate"
    cpu_threshold = 0.5
    cpu_window = "90s"
    stale_after = "2m"
    retry_after = "1d"
    on_failure = "resume"
    """
    assert parse_policy(text, "f") == Policy(7200.0, "none", "hibernate", 0.5, 90.0, 120.0, 86400.0, "resume")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[policy]\nidle_after = "30 minutes"\n', "f, line 2: policy.idle_after is wrong: '30 minutes'"),
        ("[policy]\n\nidle_after = 30\n", "f, line 3: policy.idle_after is wrong: 30 is not a duration"),
        ('[policy]\naction = "stop"\n', "f, line 2: policy.action is wrong: 'stop' is not an action"),
        ('[policy]\non_failure = "retry"\n', "f, line 2: policy.on_failure is wrong: 'retry' is nothing"),
        ("[policy]\ncpu_threshold = 0\n", "f, line 2: policy.cpu_threshold is wrong"),
        ("[policy]\ncpu_threshold = true\n", "f, line 2: policy.cpu_threshold is wrong"),
        ('[policy]\n# comment\n"idle-after" = "3m"\n', "f, line 3: policy.idle-after is unknown"),
        ('policy.idle = "3m"\n', "f, line 1: policy.idle is unknown"),
        ("[polcy]\n", "f, line 1: polcy is unknown"),
        ("policy = 3\n", "f, line 1: policy must be a table"),
        ("[policy]\nidle_after = 30m\n", "line 2, column"),
    ],
)
def test_a_mistake_is_told_with_its_place(text: str, told: str) -> None:
    with pytest.raises(UsageError) as mistake:
        parse_policy(text, "f")
    assert told in str(mistake.value)


def test_a_changed_file_is_read_again_and_a_mistake_in_it_keeps_the_last_good_policy(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('[policy]\nidle_after = "1m"\n')
    file = PolicyFile(path)
    assert file.current().idle_after == 60.0
    path.write_text('[policy]\nidle_after = "a while"\n')
    assert file.current().idle_after == 60.0
    assert "a while" in str(file.problem)
    path.write_text('[policy]\nidle_after = "90s"\n')
    assert file.current().idle_after == 90.0
    assert file.problem is None
    path.unlink()
    assert file.current() == Policy()


def test_a_mistake_in_the_very_first_reading_is_raised(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("[policy")
    with pytest.raises(UsageError, match="is not TOML"):
        PolicyFile(path).current()
