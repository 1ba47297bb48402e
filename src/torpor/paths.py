"""Where Torpor keeps things: the system's usual folders, or everything below `TORPOR_HOME`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Paths:
    """Folders of one Torpor installation; several may live side by side on one machine.

    `run` holds sockets and is empty after a boot; `state` is durable; `config` is the policy file.
    """

    run: Path
    state: Path
    config: Path

    @property
    def agent_socket(self) -> Path:
        """The HTTP API (any user may connect; every caller is identified by peer credentials)."""
        return self.run / "agent.sock"

    @property
    def keeper_socket(self) -> Path:
        """The keeper's control socket (root only)."""
        return self.run / "keeper.sock"

    @property
    def attach_socket(self) -> Path:
        """The keeper's socket for attached terminals (any user may connect, owners only are served)."""
        return self.run / "attach.sock"

    @property
    def database(self) -> Path:
        """SQLite: sessions, checkpoints, operations. Its folder is root's alone, so that nobody sees it grow."""
        return self.state / "registry" / "torpor.db"

    @property
    def logs(self) -> Path:
        """What keeper, workers and CRIU had to say (root only)."""
        return self.state / "logs"

    @property
    def store(self) -> Path:
        """The default chunk store (a local folder)."""
        return self.state / "store"

    @property
    def site_key(self) -> Path:
        """The site's secret key, 32 random bytes, mode 0600."""
        return self.state / "keys" / "site.key"

    @property
    def criu(self) -> Path:
        """Private prefix of a CRIU that `torpor setup` unpacked."""
        return self.state / "criu"

    def session(self, session_id: str) -> Path:
        """One session's own folder: logs, exit status, stdin FIFO (mode 0711, files of the owner 0600)."""
        return self.state / "sessions" / session_id

    @property
    def scratch(self) -> Path:
        """An empty folder on which every worker mounts memory that only it sees."""
        return self.state / "scratch"


SYSTEM = Paths(run=Path("/run/torpor"), state=Path("/var/lib/torpor"), config=Path("/etc/torpor/config.toml"))


def from_environment(environ: Mapping[str, str] = os.environ) -> Paths:
    """The paths below `TORPOR_HOME`, or the system's usual folders when it is not set."""
    home = environ.get("TORPOR_HOME")
    if home:
        root = Path(home).absolute()
        return Paths(run=root / "run", state=root / "state", config=root / "config.toml")
    return SYSTEM
