"""The agent's HTTP API as plain Python: one method a route, errors raised as they were on the other side.

Uses the standard library only, so that a command starts fast. Sessions, nodes and checkpoints are plain dicts as
the API sends them. A client may be shared by threads: every call has its own connection.
"""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, urlencode

from torpor import errors
from torpor.paths import Paths, from_environment

Json = dict[str, Any]
ANSWER_TIMEOUT = 60.0  # seconds without a byte of a short answer; the agent may be starting a session on a busy node
LINE_LIMIT = 4 << 20


class Client:
    """Talks to the agent of one installation. Every method raises a `TorporError` when the agent refuses, and
    AgentUnreachable when none answers."""

    def __init__(self, paths: Paths | None = None) -> None:
        self.paths = paths or from_environment()

    def node(self) -> Json:
        """Facts of the node and its agent."""
        return self._object("GET", "/v1/node")

    # Sessions

    def create_session(
        self,
        argv: list[str],
        *,
        cwd: str,
        env: Mapping[str, str],
        io: str = "detached",
        name: str | None = None,
        rows: int = 24,
        columns: int = 80,
        labels: Mapping[str, str] | None = None,
        idle_after: float | None = None,
        kind: str = "command",
        on_failure: str | None = None,
    ) -> Json:
        """Starts a session as this process's user; the answer is the running session. `idle_after` in seconds;
        `on_failure` is "resume" or "none", None for what the policy says."""
        request = {
            "argv": argv,
            "cwd": cwd,
            "env": dict(env),
            "io": io,
            "name": name,
            "rows": rows,
            "columns": columns,
            "labels": dict(labels or {}),
            "idle_after": idle_after,
            "kind": kind,
            "on_failure": on_failure,
        }
        return self._object("POST", "/v1/sessions", request)

    def look_at(self, pid: int) -> Json:
        """What adopting process `pid` would mean: keys argv, cwd, owner, pids, rss_bytes and `objections`, a list of
        sentences. Nothing is touched."""
        return self._object("POST", "/v1/adoptions", {"pid": pid, "dry_run": True})

    def adopt(
        self,
        pid: int,
        *,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
        idle_after: float | None = None,
    ) -> Json:
        """Makes a session of process `pid` and everything below it, which run on. Raises PreflightRefused when
        something stands against it."""
        request = {"pid": pid, "name": name, "labels": dict(labels or {}), "idle_after": idle_after}
        return self._object("POST", "/v1/adoptions", request)

    def sessions(self) -> list[Json]:
        """The caller's sessions (root: everybody's), oldest first."""
        answer: list[Json] = self._json("GET", "/v1/sessions")
        return answer

    def session(self, ref: str) -> Json:
        """One session by id or own name. Raises NotFound."""
        return self._object("GET", _route(ref))

    def watch(self, ref: str, version: int, timeout: float = 30.0) -> Json:
        """The session as soon as its version is greater than `version`, or as it is after `timeout` seconds."""
        route = _route(ref, "watch", version=version, timeout=timeout)
        return self._object("GET", route, timeout=timeout + ANSWER_TIMEOUT)

    def signal(self, ref: str, signum: int) -> None:
        """Sends a signal to the main command's process group."""
        self._json("POST", _route(ref, "signal"), {"signal": signum})

    def end(self, ref: str, *, keep: bool) -> Json:
        """Ends it: SIGTERM, SIGKILL after a grace. `keep`: its checkpoints stay."""
        return self._object("POST", _route(ref, "end"), {"keep": keep})

    def remove(self, ref: str, *, force: bool = False) -> Json:
        """Removes a session and its checkpoints; the answer has `bytes_freed`. `force`: a live one, too."""
        return self._object("DELETE", _route(ref, force=int(force)), timeout=None)

    def why(self, ref: str) -> Json:
        """The verdict: keys `verdict`, `since`, `sentence`, `policy`."""
        return self._object("GET", _route(ref, "why"))

    def logs(self, ref: str, stream: str = "out", *, follow: bool = False) -> Iterator[bytes]:
        """What the session printed, in pieces as they come; with `follow` until it has ended."""
        route = _route(ref, "logs", stream=stream, follow=int(follow))
        with self._request("GET", route, None, timeout=None) as response:
            while piece := response.read1(1 << 16):
                yield piece

    # Operations

    def operation(self, ref: str, kind: str, *, if_idle: bool = False) -> Iterator[Json]:
        """Runs checkpoint, hibernate or resume. Yields progress events {"event": "progress", phase, done, total}, then
        one {"event": "result", ...}; raises the operation's error. The operation goes on if nobody listens.

        `if_idle`: a kernel that is in the middle of anything is not hibernated (Conflict)."""
        query = {"if_idle": 1} if if_idle else {}
        yield from self._events("POST", _route(ref, kind, **query), None)

    def compatibility(self, ref: str) -> Json:
        """How a resume would go; nothing is changed. Keys `checkpoint`, `created`, `compatible`, `reasons`, `notes`
        (lists of sentences), `lost_seconds`. Raises Conflict when there is nothing to resume."""
        return self._object("GET", _route(ref, "compatibility"))

    def checkpoints(self, ref: str) -> list[Json]:
        """A session's checkpoints, newest first."""
        answer: list[Json] = self._json("GET", _route(ref, "checkpoints"))
        return answer

    def verify(self, ref: str) -> Iterator[Json]:
        """Reads and authenticates every byte of a session's checkpoints, or of one checkpoint. Events as above."""
        yield from self._events("POST", "/v1/verify", {"ref": ref})

    # For the relay of a kernel session

    def put_kernel(self, ref: str, kernel: Mapping[str, Any]) -> None:
        """What the relay knows of its kernel: execution_state, since, queued, waiting_for_input, last_message."""
        self._json("PUT", _route(ref, "kernel"), dict(kernel))

    def quiesced(self, ref: str, version: int, ok: bool, reason: str = "", *, lossless: bool = False) -> None:
        """The relay's answer to state `hibernating` of this version: nothing is in flight, or a sentence why not.

        `lossless`: what is in flight is saved with the session, so it may be hibernated all the same."""
        answer = {"version": version, "ok": ok, "reason": reason, "lossless": lossless}
        self._json("POST", _route(ref, "quiesced"), answer)

    def answered(self, ref: str, version: int) -> None:
        """The kernel has answered again after the resume that led to this version."""
        self._json("POST", _route(ref, "answered"), {"version": version})

    # Inside

    def _object(self, method: str, route: str, body: Any = None, timeout: float | None = ANSWER_TIMEOUT) -> Json:
        answer: Json = self._json(method, route, body, timeout)
        return answer

    def _json(self, method: str, route: str, body: Any = None, timeout: float | None = ANSWER_TIMEOUT) -> Any:
        with self._request(method, route, body, timeout) as response:
            content = response.read()
        return json.loads(content) if content else {}

    def _events(self, method: str, route: str, body: Any) -> Iterator[Json]:
        with self._request(method, route, body, timeout=None) as response:
            while line := response.readline(LINE_LIMIT):
                event: Json = json.loads(line)
                if event.get("event") == "error":
                    raise errors.from_dict(event["error"])
                yield event
                if event.get("event") == "result":
                    return
        raise errors.AgentUnreachable(
            "The agent stopped before it told how this ended.",
            safe="The operation goes on without it.",
            hint="Start the agent again with: torpor up",
        )

    @contextmanager
    def _request(self, method: str, route: str, body: Any, timeout: float | None) -> Iterator[http.client.HTTPResponse]:
        connection = _UnixConnection(str(self.paths.agent_socket), timeout)
        try:
            content = None if body is None else json.dumps(body).encode()
            connection.request(method, route, content, {"Content-Type": "application/json"} if content else {})
            response = connection.getresponse()
            if response.status >= 400:
                raise _refusal(response)
            yield response
        except TimeoutError as error:
            raise errors.AgentUnreachable(
                f"The agent did not answer within {timeout:.0f} seconds.", hint="Look at its log."
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise errors.AgentUnreachable(
                f"No agent answers on {self.paths.agent_socket} ({str(error) or type(error).__name__}).",
                safe="Sessions run on without it.",
                hint="Start it with: torpor up",
            ) from error
        finally:
            connection.close()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float | None) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _refusal(response: http.client.HTTPResponse) -> errors.TorporError:
    content = response.read()
    try:
        return errors.from_dict(json.loads(content))
    except (ValueError, AttributeError):
        return errors.TorporError(f"The agent answered {response.status} {response.reason}: {content[:200]!r}")


def _route(ref: str, action: str = "", **query: str | float) -> str:
    path = f"/v1/sessions/{quote(ref, safe='')}" + (f"/{action}" if action else "")
    return f"{path}?{urlencode(query)}" if query else path
