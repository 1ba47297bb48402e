"""Kernelspecs get the relay, and lose it without a trace."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager
from tests.jupyter.standin import StandInAgent

from torpor.cli import run
from torpor.errors import SetupError
from torpor.jupyter import install
from torpor.jupyter.command import is_wrapped, wrapped

Specs = Callable[..., Path]


@pytest.fixture
def make_spec(home: Path, monkeypatch: pytest.MonkeyPatch) -> Specs:
    """Writes kernelspecs into one folder on Jupyter's path."""
    monkeypatch.delenv("TORPOR_HOME")

    def make(name: str, **facts: Any) -> Path:
        folder = home / "jupyter_data_dir" / "kernels" / name
        folder.mkdir(parents=True)
        (folder / "logo-64x64.png").write_bytes(b"png")
        spec = {"argv": ["R", "--args", "{connection_file}"], "display_name": name, "language": "R", **facts}
        (folder / "kernel.json").write_text(json.dumps(spec, indent=4))
        return folder

    return make


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def argv_of(name: str) -> list[str]:
    return list(KernelSpecManager().get_kernel_spec(name).argv)


@pytest.mark.parametrize(
    "facts", [{}, {"env": {"A": "b"}, "metadata": {"debugger": True}}, {"metadata": {}, "env": {}}]
)
@pytest.mark.parametrize("torpor_home", [None, "/srv/torpor"])
def test_install_and_undo_leave_no_trace(
    make_spec: Specs, monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any], torpor_home: str | None
) -> None:
    if torpor_home:
        monkeypatch.setenv("TORPOR_HOME", torpor_home)
    folder = make_spec("ir", **facts)
    before = files(folder)
    assert [change.done for change in install.install(["ir"])] == ["added"]
    assert argv_of("ir") == wrapped(["R", "--args", "{connection_file}"])
    spec = KernelSpecManager().get_kernel_spec("ir")
    assert spec.env.get("TORPOR_HOME") == torpor_home
    assert spec.env.get("A") == facts.get("env", {}).get("A")
    assert [change.done for change in install.install(["ir"])] == ["unchanged"]
    assert [change.done for change in install.undo(["ir"])] == ["restored"]
    assert files(folder) == before
    assert install.undo() == []


def test_what_was_changed_since_stays(make_spec: Specs) -> None:
    folder = make_spec("ir")
    install.install(["ir"])
    spec = json.loads((folder / "kernel.json").read_text())
    spec["display_name"] = "R, renamed"
    (folder / "kernel.json").write_text(json.dumps(spec))
    install.undo()
    restored = json.loads((folder / "kernel.json").read_text())
    assert restored["display_name"] == "R, renamed"
    assert restored["argv"] == ["R", "--args", "{connection_file}"]
    assert "torpor" not in restored["metadata"]
    assert set(files(folder)) == {"kernel.json", "logo-64x64.png"}


def test_a_relay_that_moved_is_brought_up_to_date(make_spec: Specs) -> None:
    folder = make_spec("ir")
    install.install(["ir"])
    text = (folder / "kernel.json").read_text()
    (folder / "kernel.json").write_text(text.replace(wrapped([])[0], "/old/bin/torpor"))
    assert argv_of("ir")[0] == "/old/bin/torpor"
    assert [change.done for change in install.install(["ir"])] == ["added"]
    assert argv_of("ir") == wrapped(["R", "--args", "{connection_file}"])


def test_python_means_the_environments_own(make_spec: Specs, tmp_path: Path) -> None:
    make_spec("plain", argv=["python3", "-m", "ipykernel_launcher", "-f", "{connection_file}"])
    install.install(["plain"])
    assert argv_of("plain")[-5] == sys.executable
    folder = tmp_path / "share" / "jupyter" / "kernels" / "there"
    folder.mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    assert install._with_absolute_python(["python", "-m", "k"], folder)[0] == str(tmp_path / "bin" / "python")


def test_a_copy_where_the_original_is_not_touched(
    make_spec: Specs, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = home / "system" / "kernels"
    system.mkdir(parents=True)
    make_spec("ir").rename(system / "ir")
    monkeypatch.setenv("JUPYTER_PATH", "")
    monkeypatch.setattr("jupyter_core.paths.SYSTEM_JUPYTER_PATH", [str(home / "system")])
    before = files(system / "ir")
    (change,) = install.install(["ir"], install.user_kernels())
    assert (change.done, change.folder) == ("copied", install.user_kernels() / "ir")
    assert files(system / "ir") == before
    assert is_wrapped(argv_of("ir"))
    assert (change.folder / "logo-64x64.png").exists()
    assert [change.done for change in install.install(["ir"])] == ["unchanged"]
    assert [change.done for change in install.undo()] == ["removed"]
    assert not change.folder.exists()
    assert argv_of("ir") == ["R", "--args", "{connection_file}"]


def test_a_copy_elsewhere_is_told_apart(make_spec: Specs, tmp_path: Path) -> None:
    make_spec("ir")
    assert [change.done for change in install.install(["ir"], tmp_path / "kernels")] == ["shadowed"]
    assert [change.done for change in install.undo(["ir"], tmp_path / "kernels")] == ["removed"]


def test_no_copy_that_jupyter_would_not_use(make_spec: Specs, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_spec("ir")
    monkeypatch.setattr(install, "_is_writable", lambda _: False)
    monkeypatch.setattr(install, "user_kernels", lambda: folder.parent.parent / "elsewhere")
    with pytest.raises(SetupError, match="would not be used"):
        install.install(["ir"])
    assert not (folder.parent.parent / "elsewhere" / "ir").exists()


def test_the_command(make_spec: Specs, capsys: pytest.CaptureFixture[str]) -> None:
    make_spec("ir")
    make_spec("julia")
    assert run(["jupyter", "install", "--kernel", "ir", "--kernel", "julia"]) == 0
    assert "ir: runs under Torpor" in capsys.readouterr().out
    assert run(["jupyter", "install", "--undo", "--json"]) == 0
    assert [change["done"] for change in json.loads(capsys.readouterr().out)] == ["restored", "restored"]
    assert run(["jupyter", "install", "--kernel", "nosuch"]) == 3
    assert run(["jupyter", "install", "--user", "--sys-prefix"]) == 2


def test_an_installed_kernel_runs(agent: StandInAgent, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "0")
    install.install(["python3"], install.user_kernels())
    manager = KernelManager(kernel_name="python3", connection_file=str(home / "jupyter_runtime_dir" / "k.json"))
    assert is_wrapped(manager.kernel_spec.argv)
    manager.start_kernel()
    client = manager.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        assert agent.only.state == "running"
    finally:
        client.stop_channels()
        manager.shutdown_kernel()
        manager.context.destroy(linger=0)


@pytest.mark.parametrize(
    ("argv", "is_relay"),
    [
        (["/usr/bin/torpor", "kernel", "-f", "x", "--", "R"], True),
        (["/usr/bin/python3", "-m", "torpor", "kernel", "-f", "x", "--", "R"], True),
        (["R", "-e", "IRkernel::main()", "--args", "x"], False),
        (["kernel", "--", "x"], False),
        (["python", "-m", "other", "kernel", "--", "x"], False),
    ],
)
def test_a_relays_command_is_known(argv: list[str], is_relay: bool) -> None:
    assert is_wrapped(argv) is is_relay
