"""The relay and its inner half: what they add to each message, what they leave of large output, and their memory.

Beside the same kernel without Torpor, and beside a relay whose kernel speaks TCP and has no inner half.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import time
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager
from jupyter_client.provisioning.factory import KernelProvisionerFactory

from _report import Report, Sample, interleave, options

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.installation import Installation  # the tests' own way to run a whole Torpor beside others

MB = 1_000_000
PATIENCE = 120.0
INNER, TCP, DIRECT = "inner half", "relay only (tcp)", "direct"
PROVISIONERS = {INNER: "torpor", TCP: "torpor", DIRECT: "local-provisioner"}
JUPYTER_FOLDERS = ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR")


@contextlib.contextmanager
def an_agent() -> Iterator[Installation]:
    """A whole Torpor in a temporary folder that also holds Jupyter's files; nothing of it is left afterwards."""
    installation = Installation()
    os.environ["TORPOR_HOME"] = str(installation.home)
    for name in JUPYTER_FOLDERS:
        folder = installation.home / name.lower()
        folder.mkdir(mode=0o700)
        os.environ[name] = str(folder)
    try:
        installation.start()
        yield installation
    finally:
        with contextlib.redirect_stdout(io.StringIO()):  # what it logged
            installation.close()


@contextlib.contextmanager
def a_kernel(contender: str) -> Iterator[BlockingKernelClient]:
    """A client of a new ipykernel."""
    os.environ["JUPYTER_DEFAULT_PROVISIONER_NAME"] = PROVISIONERS[contender]
    KernelProvisionerFactory.clear_instance()
    connection_file = Path(os.environ["JUPYTER_RUNTIME_DIR"]) / f"kernel-{uuid.uuid4()}.json"
    manager = KernelManager(kernel_name="python3", connection_file=str(connection_file))
    if contender == TCP:
        manager.kernel_spec.metadata["torpor"] = {"transport": "tcp"}
    manager.start_kernel()
    client = manager.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=PATIENCE)
        yield client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        manager.context.destroy(linger=0)


def finish(client: BlockingKernelClient, request: str) -> int:
    """Waits for a request's reply and for its idle status; the characters that it printed."""
    while client.get_shell_msg(timeout=PATIENCE)["parent_header"].get("msg_id") != request:
        pass
    printed = 0
    while True:
        message = client.get_iopub_msg(timeout=PATIENCE)
        if message["parent_header"].get("msg_id") != request:
            continue
        if message["msg_type"] == "stream":
            printed += len(message["content"]["text"])
        elif message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
            return printed


def question(client: BlockingKernelClient) -> Sample:
    """One small request and its reply: two messages through the relay."""
    started = time.monotonic()
    request = client.kernel_info()
    while client.get_shell_msg(timeout=PATIENCE)["parent_header"].get("msg_id") != request:
        pass
    answered = time.monotonic() - started
    while True:  # its statuses, so that the next one finds silence
        message = client.get_iopub_msg(timeout=PATIENCE)
        if message["parent_header"].get("msg_id") == request and message["content"]["execution_state"] == "idle":
            return {"ms from request to reply": answered * 1000}


def empty_cell(client: BlockingKernelClient) -> Sample:
    """From sending a cell that does nothing to its reply and idle status."""
    started = time.monotonic()
    finish(client, client.execute("pass"))
    return {"ms for an empty cell": (time.monotonic() - started) * 1000}


def flood(client: BlockingKernelClient, megabytes: int) -> Sample:
    """A cell that prints a megabyte at a time."""
    started = time.monotonic()
    request = client.execute(f"for _ in range({megabytes}): print('y' * {MB - 1}, flush=True)")
    assert finish(client, request) == megabytes * MB
    return {f"MB/s of output ({megabytes} MB)": megabytes / (time.monotonic() - started)}


def memory(installation: Installation) -> Sample:
    """The inner half's share of memory: what it has alone, and its part of what it has in common with others."""
    for session in installation.client.sessions():
        for pid in session["pids"]:
            if Path(f"/proc/{pid}/comm").read_text().strip() == "torpor-inner":
                facts = re.findall(r"^(Rss|Pss|Private_Dirty): +(\d+) kB", rollup(pid), re.MULTILINE)
                return {f"MB {name}": int(size) * 1024 / MB for name, size in facts}
    raise AssertionError("there is no inner half")


def rollup(pid: int) -> str:
    return Path(f"/proc/{pid}/smaps_rollup").read_text()


def main() -> None:
    chosen = options(__doc__, messages=500, output=100, rounds=7)
    report = Report("The relay between a client and its kernel, with and without an inner half")
    with contextlib.ExitStack() as stack:
        installation = stack.enter_context(an_agent())
        kernels = {who: stack.enter_context(a_kernel(who)) for who in PROVISIONERS}
        report.add("inner half", memory(installation))
        for measure, rounds in (
            (question, chosen.messages),
            (empty_cell, chosen.messages // 5),
            (partial(flood, megabytes=chosen.output), chosen.rounds),
        ):
            interleave(rounds, report, *((who, partial(measure, client)) for who, client in kernels.items()))
        report.add("inner half, after all that", memory(installation))
    question_figure, flood_figure = "ms from request to reply", f"MB/s of output ({chosen.output} MB)"
    for who in (INNER, TCP):
        added = report.median(f"{who}: {question_figure}") - report.median(f"{DIRECT}: {question_figure}")
        report.add(who, {"ms added to each message (aim 0.5)": added / 2})
        for name, figure in (("request to reply", question_figure), ("output", flood_figure)):
            report.ratio(f"{name}: {who} / direct", f"{who}: {figure}", f"{DIRECT}: {figure}")
    report.print(as_json=chosen.json)


if __name__ == "__main__":
    main()
