from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from torpor.engine.criu_binary import Criu
from torpor.paths import Paths, from_environment
from torpor.setup import provision

FakeCriu = Callable[..., Path]


@pytest.fixture
def home(tmp_path: Path) -> Paths:
    return from_environment({"TORPOR_HOME": str(tmp_path / "home")})


@pytest.fixture
def fake_criu(tmp_path: Path) -> FakeCriu:
    """Makes a program that says it is a CRIU of some version, and does what its body says otherwise."""

    def make(version: str, body: str = "exit 1", folder: str = "bin") -> Path:
        program = tmp_path / folder / "criu"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo "Version: {version}"; exit; fi\n{body}\n')
        program.chmod(0o755)
        return program

    return make


@pytest.fixture(scope="session")
def provisioned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Paths, Criu, list[str]]:
    """A CRIU really fetched from Debian's archive into a folder of its own: paths, CRIU, what progress said."""
    paths = from_environment({"TORPOR_HOME": str(tmp_path_factory.mktemp("provisioned"))})
    os.chmod(paths.state.parent, 0o755)
    said: list[str] = []
    return paths, provision.provision(paths, said.append), said
