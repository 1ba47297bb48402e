"""Members of the policy's group of admins: they see, save and resume the sessions of others, and no more than that."""

from __future__ import annotations

import grp

import pytest
from tests.agent.people import UID, Somebody
from tests.installation import Installation, eventually

ADMINS = grp.getgrall()[-1]
ADMIN_UID, OTHER_UID = 54331, 54341


@pytest.fixture
def somebody(agent: Installation) -> Somebody:
    return Somebody(agent)


@pytest.fixture
def admin(agent: Installation) -> Somebody:
    agent.paths.config.write_text(f'[access]\nadmins = "{ADMINS.gr_name}"\n')
    return Somebody(agent, ADMIN_UID, (ADMINS.gr_gid,))


def test_an_admin_sees_saves_and_resumes_the_sessions_of_others(
    agent: Installation, somebody: Somebody, admin: Somebody
) -> None:
    session = somebody.ask(
        "create_session", argv=["sleep", "1000"], cwd="/", env={"PATH": "/bin", "TOKEN": "secret"}, name="theirs"
    )
    assert [one["name"] for one in admin.ask("sessions")] == ["theirs"]
    for ref in ("theirs", session["id"]):
        shown = admin.ask("session", ref=ref)
        assert (shown["uid"], shown["launch"]["argv"], shown["launch"]["env"]) == (UID, ["sleep", "1000"], {})
    assert "secret" not in str(admin.ask("sessions"))
    assert somebody.ask("session", ref="theirs")["launch"]["env"]["TOKEN"] == "secret"
    assert admin.ask("why", ref="theirs")["state"] == "running"
    assert admin.ask("operation", ref="theirs", kind="checkpoint")[-1]["event"] == "result"
    assert admin.ask("operation", ref="theirs", kind="hibernate")[-1]["event"] == "result"
    assert len(admin.ask("checkpoints", ref="theirs")) == 2
    assert admin.ask("compatibility", ref="theirs")["compatible"]
    assert admin.ask("operation", ref="theirs", kind="resume")[-1]["event"] == "result"
    assert somebody.ask("session", ref="theirs")["state"] == "running"


def test_an_admin_neither_looks_into_nor_ends_the_sessions_of_others(
    agent: Installation, somebody: Somebody, admin: Somebody
) -> None:
    session = somebody.start("sleep", "1000", name="theirs", io="terminal")
    checkpoint = agent.operate(session["id"], "checkpoint")["id"]
    for method, arguments in {
        "watch": {"version": 0},
        "logs": {},
        "signal": {"signum": 15},
        "end": {"keep": True},
        "remove": {"force": True},
        "verify": {},
        "put_kernel": {"kernel": {"execution_state": "idle", "since": 0.0}},
        "quiesced": {"version": 1, "ok": True},
        "answered": {"version": 1},
    }.items():
        refused = admin.ask(method, ref="theirs", **arguments)
        assert refused["code"] == "not_permitted", method
        assert "only its owner" in refused["message"]
    assert admin.ask("verify", ref=checkpoint)["code"] == "not_found"
    assert somebody.ask("session", ref="theirs")["state"] == "running"


def test_who_is_no_member_sees_nothing(agent: Installation, somebody: Somebody, admin: Somebody) -> None:
    somebody.start("sleep", "1000", name="theirs")
    other = Somebody(agent, OTHER_UID, ())
    assert other.ask("sessions") == []
    assert other.ask("session", ref="theirs")["code"] == "not_found"
    assert other.ask("operation", ref="theirs", kind="hibernate")["code"] == "not_found"


def test_membership_is_that_of_the_process_and_follows_the_policy(
    agent: Installation, somebody: Somebody, admin: Somebody
) -> None:
    somebody.start("sleep", "1000", name="theirs")
    left = Somebody(agent, ADMIN_UID, ())
    assert left.ask("sessions") == []
    assert len(admin.ask("sessions")) == 1
    agent.paths.config.write_text("")
    assert eventually(lambda: admin.ask("sessions"), lambda seen: seen == []) == []


def test_an_unknown_group_leaves_the_policy_as_it_was(agent: Installation, somebody: Somebody, admin: Somebody) -> None:
    somebody.start("sleep", "1000", name="theirs")
    assert len(admin.ask("sessions")) == 1
    agent.paths.config.write_text('[access]\nadmins = "no-such-group-here"\n')
    problem = somebody.ask("why", ref="theirs")["policy_problem"]
    assert "line 2: access.admins is wrong: There is no group 'no-such-group-here'" in problem["message"]
    assert len(admin.ask("sessions")) == 1


def test_an_agent_does_not_start_with_an_unknown_group(agent: Installation) -> None:
    agent.stop()
    agent.paths.config.write_text('[access]\nadmins = "no-such-group-here"\n')
    refused = agent.torpor("up")
    assert refused.returncode == 2
    assert "There is no group 'no-such-group-here' on this machine" in refused.stderr
