"""The policy: what idle means and what is done about it, read from one TOML file.

```toml
[policy]
idle_after = "30m"         # since the last use
action = "hibernate"       # or "none"
unattended = "hibernate"   # or "none": commands that neither a cell nor a key wakes; `--idle-after` opts one in again
cpu_threshold = 0.02       # fraction of one core
cpu_window = "1m"          # over which it is measured
stale_after = "90s"        # a reading older than this is unknown, and unknown counts as busy
retry_after = "10m"        # after a refused or failed attempt
on_failure = "none"        # or "resume": a command that fails goes on from its last checkpoint by itself

[access]
admins = "staff"           # a group whose members see, save and resume the sessions of others; nobody unless set
```
"""

from __future__ import annotations

import grp
import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from torpor.durations import parse_duration
from torpor.errors import UsageError

ACTIONS = ("hibernate", "none")
ON_FAILURE = ("resume", "none")


class Policy(msgspec.Struct, frozen=True):
    """One rule for all sessions. Durations are seconds; `cpu_threshold` is a fraction of one core.

    `admins` is the id of the group whose members may see, save and resume the sessions of others.
    """

    idle_after: float = 1800.0
    action: str = "hibernate"
    unattended: str = "hibernate"
    cpu_threshold: float = 0.02
    cpu_window: float = 60.0
    stale_after: float = 90.0
    retry_after: float = 600.0
    on_failure: str = "none"
    admins: int | None = None

    def limit(self, own: float | None) -> float:
        """Seconds of idleness after which a session is due: its `own` limit, or this policy's."""
        return self.idle_after if own is None else own


def parse_policy(text: str, name: str) -> Policy:
    """The policy in `text`; what it leaves out has its default. `name` is the file's name for messages.

    Raises UsageError with line and key of the first mistake; an unknown key is one, and so is an unknown group.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as mistake:
        raise UsageError(f"{name} is not TOML: {mistake}.") from mistake
    found: dict[str, Any] = {}
    for table, values in document.items():
        if table not in _TABLES:
            known = " and ".join(f"[{one}]" for one in _TABLES)
            raise _mistake(text, name, "", table, "is unknown", f"The tables are {known}.")
        if not isinstance(values, dict):
            raise _mistake(text, name, "", table, "must be a table", f"Write [{table}].")
        found |= {key: _value(text, name, table, key, value) for key, value in values.items()}
    return Policy(**found)


class PolicyFile:
    """The policy in a file, read again when the file changes. No file means the defaults."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem: UsageError | None = None
        self._policy: Policy | None = None
        self._seen: tuple[int, int, int] | None = None

    def current(self) -> Policy:
        """The policy in force. A mistake in a changed file leaves the last good policy in force and is in `problem`.

        Raises UsageError when the very first reading finds a mistake.
        """
        seen = self._stamp()
        if self._policy is not None and seen == self._seen:
            return self._policy
        try:
            self._policy = self._read()
            self.problem = None
        except UsageError as mistake:
            if self._policy is None:
                raise
            self.problem = mistake
        self._seen = seen
        return self._policy

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _read(self) -> Policy:
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return Policy()
        except (OSError, UnicodeDecodeError) as reason:
            raise UsageError(f"{self.path} cannot be read: {reason}.") from reason
        return parse_policy(text, str(self.path))


def _value(text: str, name: str, table: str, key: str, value: Any) -> Any:
    check = _TABLES[table].get(key)
    if check is None:
        raise _mistake(text, name, table, key, "is unknown", f"Known are {', '.join(_TABLES[table])}.")
    try:
        return check(value)
    except UsageError as reason:
        raise _mistake(text, name, table, key, f"is wrong: {reason.message}", reason.hint) from reason


def _duration(value: Any) -> float:
    if not isinstance(value, str):
        raise UsageError(f"{value!r} is not a duration.", hint='Write it with its unit and quotes: "30m".')
    return parse_duration(value)


def _action(value: Any) -> str:
    if value not in ACTIONS:
        raise UsageError(f"{value!r} is not an action.", hint='Write "hibernate" or "none".')
    return str(value)


def _on_failure(value: Any) -> str:
    if value not in ON_FAILURE:
        raise UsageError(f"{value!r} is nothing that can be done.", hint='Write "resume" or "none".')
    return str(value)


def _fraction(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1024:
        raise UsageError(f"{value!r} is not a fraction of one core.", hint="Write a number above 0, such as 0.02.")
    return float(value)


def _group(value: Any) -> int:
    if not isinstance(value, str):
        raise UsageError(f"{value!r} is not a group's name.", hint='Write it with quotes: "staff".')
    try:
        return grp.getgrnam(value).gr_gid
    except KeyError as unknown:
        raise UsageError(
            f"There is no group {value!r} on this machine.", hint=f"Make it with: groupadd {value}"
        ) from unknown


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "idle_after": _duration,
    "action": _action,
    "unattended": _action,
    "cpu_threshold": _fraction,
    "cpu_window": _duration,
    "stale_after": _duration,
    "retry_after": _duration,
    "on_failure": _on_failure,
}
_TABLES: dict[str, dict[str, Callable[[Any], Any]]] = {"policy": _CHECKS, "access": {"admins": _group}}


def _mistake(text: str, name: str, table: str, key: str, what: str, hint: str) -> UsageError:
    line = _line(text, key)
    dotted = f"{table}.{key}" if table else key
    return UsageError(f"{name}{f', line {line}' if line else ''}: {dotted} {what}", hint=hint)


def _line(text: str, key: str) -> int | None:
    """Line of the first place that names `key`; None when it is written in a way that only a TOML parser sees."""
    names_key = re.compile(rf"""\s*\[?\s*(?:(?:policy|access)\s*\.\s*)?["']?{re.escape(key)}["']?\s*(?:[=.\]]|$)""")
    return next((number for number, line in enumerate(text.splitlines(), 1) if names_key.match(line)), None)
