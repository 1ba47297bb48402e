"""Users of a machine, for tests: real ones for the kernel, though without a name or a home."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests.installation import PATIENCE, PYTHON, Installation

import torpor

UID, GID, GROUP = 54321, 54322, 54323

ASK = """
import json, sys
from torpor.client import Client
from torpor.errors import TorporError
method, arguments = json.loads(sys.argv[1])
try:
    answer = getattr(Client(), method)(**arguments)
    print(json.dumps(list(answer) if hasattr(answer, "__next__") else answer))
except TorporError as error:
    print(json.dumps(error.as_dict()))
"""


class Somebody:
    """A user who has neither a name nor rights; they use the client as it is shipped, with the system's Python."""

    def __init__(self, agent: Installation, uid: int = UID, groups: tuple[int, ...] = (GROUP,)) -> None:
        self.agent, self.uid, self.groups = agent, uid, groups
        self.library = agent.home / "lib"
        package = Path(torpor.__file__).parent
        (self.library / "torpor").mkdir(parents=True, exist_ok=True)
        for module in ("__init__", "errors", "paths", "client"):
            shutil.copy(package / f"{module}.py", self.library / "torpor")
        groups_option = f"--groups={','.join(map(str, groups))}" if groups else "--clear-groups"
        self._identity = ("setpriv", f"--reuid={uid}", f"--regid={GID}", groups_option)
        self._environment = {
            "PATH": os.environ["PATH"],
            "TORPOR_HOME": str(agent.home),
            "PYTHONPATH": str(self.library),
        }
        for entry in (self.library, *self.library.rglob("*")):
            entry.chmod(0o755)

    def run(self, *command: str, wrapper: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        """Runs a command as this user, with their supplementary groups."""
        return subprocess.run(
            [*wrapper, *self._identity, *command],
            env=self._environment,
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
        )

    def ask(self, method: str, *, wrapper: tuple[str, ...] = (), **arguments: Any) -> Any:
        """Calls the client; the answer, or the error as it crosses the wire."""
        done = self.run(PYTHON, "-S", "-c", ASK, json.dumps([method, arguments]), wrapper=wrapper)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def start_operation(self, ref: str, kind: str) -> subprocess.Popen[str]:
        """Starts an operation, and does not wait for its end."""
        code = "import sys; from torpor.client import Client; list(Client().operation(*sys.argv[1:]))"
        return subprocess.Popen(
            [*self._identity, PYTHON, "-S", "-c", code, ref, kind],
            env=self._environment,
            cwd="/",
            text=True,
        )

    def start(self, *argv: str, **facts: Any) -> Any:
        """Starts a detached session."""
        return self.ask("create_session", argv=list(argv), cwd="/", env={"PATH": os.environ["PATH"]}, **facts)
