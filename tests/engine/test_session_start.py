"""What a session gets when it starts, seen from inside it and from the node, as root and as another user."""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
from tests.engine.stage import USER, Stage, eventually, exit_status, me, user

from torpor.engine import procfs
from torpor.errors import EngineError
from torpor.model import Caller, InputOutput

FACTS = """
import json, os, resource
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps({
    "uid": os.getresuid(), "gid": os.getresgid(), "groups": sorted(os.getgroups()), "umask": os.umask(0),
    "affinity": sorted(os.sched_getaffinity(0)), "nice": os.nice(0), "env": dict(os.environ), "cwd": os.getcwd(),
    "nofile": resource.getrlimit(resource.RLIMIT_NOFILE), "core": resource.getrlimit(resource.RLIMIT_CORE),
    "no_new_privs": int(status["NoNewPrivs"]), "bounding": int(status["CapBnd"], 16),
    "effective": int(status["CapEff"], 16), "inheritable": int(status["CapInh"], 16),
    "ignored": int(status["SigIgn"], 16) & PYTHONS_AND_LIBCS, "blocked": int(status["SigBlk"], 16),
    "cgroup": open("/proc/self/cgroup").read().splitlines(), "pid": os.getpid(), "parent": os.getppid(),
    "fds": sorted(os.listdir("/proc/self/fd")), "shm": os.listdir("/dev/shm"),
    "oom": int(open("/proc/self/oom_score_adj").read()), "comm": open("/proc/1/comm").read().strip(),
    "namespaces": {name: os.readlink(f"/proc/self/ns/{name}") for name in ("mnt", "pid", "ipc", "net", "uts", "user")},
}))
"""
FACTS = FACTS.replace("PYTHONS_AND_LIBCS", str(~sum(1 << number - 1 for number in (13, 25, 32, 33))))
FAMILY = """
import os, time
child = os.fork()
if child == 0:
    os.fork()
print("ready", flush=True)
time.sleep(1000)
"""


def test_a_session_has_its_callers_identity_bounds_and_surroundings(stage: Stage) -> None:
    processor = min(os.sched_getaffinity(0))
    caller = user(
        umask=0o027,
        affinity=(processor,),
        nice=3,
        limits={"NOFILE": (100, 200), "CORE": (0, 0)},
        capabilities_bounding=me().capabilities_bounding & ~(1 << 21),
    )
    env = {"PATH": "/usr/bin:/bin", "GREETING": "hej då\nzwei", "JPY_PARENT_PID": "1", "EMPTY": ""}
    facts = stage.facts(FACTS, caller=caller, env=env, cwd="/tmp")
    assert facts["uid"] == facts["gid"] == [USER] * 3
    assert facts["groups"] == [USER + 1, USER + 2]
    assert facts["umask"] == 0o027
    assert facts["affinity"] == [processor]
    assert facts["nice"] == 3
    assert facts["nofile"] == [100, 200]
    assert facts["core"] == [0, 0]
    assert facts["no_new_privs"] == 1
    assert facts["effective"] == facts["inheritable"] == 0
    assert facts["bounding"] == caller.capabilities_bounding
    assert facts["ignored"] == facts["blocked"] == 0
    assert facts["oom"] == 0
    assert facts["cwd"] == "/tmp"
    assert {k: v for k, v in facts["env"].items() if k != "LC_CTYPE"} == {
        "PATH": "/usr/bin:/bin",
        "GREETING": "hej då\nzwei",
        "EMPTY": "",
    }
    assert facts["fds"] == ["0", "1", "2", "3"]  # the last one is the listing itself
    assert facts["shm"] == []
    assert (facts["pid"], facts["parent"], facts["comm"]) == (2, 1, "torpor-init")
    assert facts["cgroup"] == list(caller.cgroups)
    ours = procfs.namespaces(os.getpid())
    for name in ("mnt", "pid", "ipc"):
        assert facts["namespaces"][name] != ours[name]
    for name in ("net", "uts", "user"):
        assert facts["namespaces"][name] == ours[name]


def test_root_keeps_no_more_capabilities_than_its_caller(stage: Stage) -> None:
    without_admin = me().capabilities_bounding & ~(1 << 21)
    facts = stage.facts(FACTS, caller=msgspec.structs.replace(me(), capabilities_bounding=without_admin))
    assert facts["uid"] == [0, 0, 0]
    assert facts["effective"] == facts["bounding"] == without_admin
    assert facts["no_new_privs"] == 1


def test_no_file_of_a_session_comes_from_the_nodes_mount_namespace(stage: Stage) -> None:
    for number, io in enumerate(InputOutput):
        session = "abc"[number]
        made = stage.python(FAMILY, session=session, io=io)
        stage.wait_for_output("ready", session)
        for pid in eventually(partial(procfs.tree, made.pid), lambda tree: len(tree) == 4):
            own = {int(line.split()[0]) for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()}
            for fd in os.listdir(f"/proc/{pid}/fd"):
                if os.readlink(f"/proc/{pid}/fd/{fd}").startswith("/"):
                    assert mount_id(f"/proc/{pid}/fdinfo/{fd}") in own, os.readlink(f"/proc/{pid}/fd/{fd}")
        links = {os.readlink(f"/proc/{made.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{made.pid}/fd")}
        assert links == {"/dev/null", str(stage.folder(session) / "exit")}


def test_shared_memory_is_the_sessions_own_and_tmp_is_the_nodes(stage: Stage) -> None:
    mark = stage.home / "mark"
    made = stage.python(f"open('/dev/shm/mine', 'w'); open({str(mark)!r}, 'w'); print('ready', flush=True); input()")
    stage.wait_for_exit()
    assert mark.exists()
    assert not os.path.exists("/dev/shm/mine")
    made = stage.launch("sh", "-c", "stat -c %a /dev/shm; df --output=size -B1 /dev/shm | tail -1", session="b")
    assert made.notes == ()
    stage.wait_for_exit("b")
    mode, size = stage.output("b").split()
    host = os.statvfs("/dev/shm")
    assert (mode, int(size)) == ("1777", host.f_frsize * host.f_blocks)


def test_files_of_a_session_belong_to_its_user_in_a_folder_of_root(stage: Stage) -> None:
    stage.launch("true", caller=user(), io=InputOutput.STREAMS)
    assert stage.wait_for_exit() == 0
    folder = stage.folder("a").stat()
    assert (folder.st_uid, stat.S_IMODE(folder.st_mode)) == (0, 0o711)
    for name in ("out.log", "err.log", "exit"):
        facts = (stage.folder("a") / name).lstat()
        assert (facts.st_uid, stat.S_IMODE(facts.st_mode)) == (USER, 0o600), name


def test_a_log_that_was_replaced_by_a_link_is_not_followed(stage: Stage) -> None:
    stage.folder("a").mkdir(parents=True)
    target = stage.home / "target"
    (stage.folder("a") / "out.log").symlink_to(target)
    with pytest.raises(EngineError, match="cannot start"):
        stage.launch("true")
    assert not target.exists()


def test_a_folder_that_others_may_change_is_refused(stage: Stage) -> None:
    stage.folder("a").mkdir(parents=True)
    os.chown(stage.folder("a"), USER, USER)
    with pytest.raises(EngineError, match="can be changed by others"):
        stage.launch("true")


@pytest.mark.parametrize("session", ["", "A", "../a", "a/b", "a" * 41, "a\n"])
def test_what_is_no_id_never_becomes_a_path(stage: Stage, session: str) -> None:
    with pytest.raises(EngineError, match="Not the id of a session"):
        stage.launch("true", session=session)


def test_a_session_exists_once(stage: Stage) -> None:
    stage.launch("sleep", "1000")
    with pytest.raises(EngineError, match="exists already"):
        stage.launch("true")


def test_a_working_directory_that_is_not_there_is_an_error_before_anything_runs(stage: Stage) -> None:
    with pytest.raises(EngineError, match="working directory /nowhere cannot be entered: No such file"):
        stage.launch("true", cwd="/nowhere")
    assert stage.keeper.sessions() == []


def test_a_working_directory_closed_to_the_user_is_an_error(stage: Stage, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with pytest.raises(EngineError, match="cannot be entered: Permission denied"):
        stage.launch("true", cwd=str(tmp_path), caller=user())
    stage.launch("true", cwd="/", caller=user())  # the name is free again
    assert stage.wait_for_exit() == 0


def test_a_limit_that_cannot_be_set_is_an_error(stage: Stage) -> None:
    with pytest.raises(EngineError, match="limit NOFILE"):
        stage.launch("true", caller=msgspec.structs.replace(me(), limits={"NOFILE": (20, 10)}))


@pytest.mark.parametrize(
    ("argv", "status", "said"),
    [
        (("true",), 0, ""),
        (("sh", "-c", "exit 7"), 7, ""),
        (("sh", "-c", "kill -9 $$"), 137, ""),
        (("sh", "-c", "kill -TERM $$"), 143, ""),
        (("no-such-command",), 127, "torpor: no-such-command: command not found\n"),
        (("/no/such/command",), 127, "torpor: /no/such/command: No such file or directory\n"),
        (("/etc/passwd",), 126, "torpor: /etc/passwd: Permission denied\n"),
    ],
)
def test_exit_statuses_are_those_of_a_shell(stage: Stage, argv: tuple[str, ...], status: int, said: str) -> None:
    stage.launch(*argv, caller=user(), io=InputOutput.STREAMS)
    assert stage.wait_for_exit() == status
    assert exit_status(stage) == status
    assert stage.output(name="err.log") == said


@pytest.fixture
def cgroup() -> Iterator[Path]:
    found = sorted(Path("/sys/fs/cgroup").glob("pids")) or [Path("/sys/fs/cgroup")]
    made = found[0] / f"torpor-test-{os.getpid()}"
    made.mkdir()
    yield made
    eventually(lambda: not (made / "cgroup.procs").read_text())
    made.rmdir()


def in_cgroup(cgroup: Path) -> Caller:
    """We, as if we had been in `cgroup` of its hierarchy."""
    controller = cgroup.parent.name
    lines = []
    for line in me().cgroups:
        number, controllers, _ = line.split(":", 2)
        lines.append(f"{number}:{controllers}:/{cgroup.name}" if controllers == controller else line)
    if lines == list(me().cgroups):  # version 2 alone
        lines = [f"0::/{cgroup.name}"]
    return msgspec.structs.replace(me(), cgroups=tuple(lines))


def test_a_session_is_placed_in_its_callers_cgroup(stage: Stage, cgroup: Path) -> None:
    caller = in_cgroup(cgroup)
    made = stage.launch("sleep", "1000", caller=caller)
    tree = eventually(lambda: procfs.tree(made.pid), lambda found: len(found) == 2)
    members = {int(pid) for pid in (cgroup / "cgroup.procs").read_text().split()}
    assert members == set(tree)
    stage.keeper.kill("a")


def test_a_cgroup_that_is_gone_is_told_and_does_not_matter(stage: Stage, cgroup: Path) -> None:
    caller = in_cgroup(cgroup)
    gone = msgspec.structs.replace(
        caller, cgroups=tuple(line + "-gone" for line in caller.cgroups if cgroup.name in line)
    )
    made = stage.launch("true", session="b", caller=gone)
    assert len(made.notes) == 1
    assert "is gone" in made.notes[0]


def test_limits_of_the_keeper_do_not_reach_a_session(stage: Stage) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    facts = stage.facts(FACTS)
    assert facts["nofile"] == [soft, hard]


def mount_id(fdinfo: str) -> int:
    return next(int(line.split()[1]) for line in Path(fdinfo).read_text().splitlines() if line.startswith("mnt_id"))
