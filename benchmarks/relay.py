"""The relay: what it adds to each message, and what it leaves of large output, against the same kernel without it."""

from __future__ import annotations

import contextlib
import io
import os
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
PROVISIONERS = {"relayed": "torpor", "direct": "local-provisioner"}
JUPYTER_FOLDERS = ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR")


@contextlib.contextmanager
def an_agent() -> Iterator[None]:
    """A whole Torpor in a temporary folder that also holds Jupyter's files; nothing of it is left afterwards."""
    installation = Installation()
    os.environ["TORPOR_HOME"] = str(installation.home)
    for name in JUPYTER_FOLDERS:
        folder = installation.home / name.lower()
        folder.mkdir(mode=0o700)
        os.environ[name] = str(folder)
    try:
        installation.start()
        yield
    finally:
        with contextlib.redirect_stdout(io.StringIO()):  # what it logged
            installation.close()


@contextlib.contextmanager
def a_kernel(provisioner: str) -> Iterator[BlockingKernelClient]:
    """A client of a new ipykernel."""
    os.environ["JUPYTER_DEFAULT_PROVISIONER_NAME"] = provisioner
    KernelProvisionerFactory.clear_instance()
    connection_file = Path(os.environ["JUPYTER_RUNTIME_DIR"]) / f"kernel-{uuid.uuid4()}.json"
    manager = KernelManager(kernel_name="python3", connection_file=str(connection_file))
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


def main() -> None:
    chosen = options(__doc__, messages=500, output=100, rounds=7)
    report = Report("The relay between a client and its kernel")
    with an_agent(), a_kernel(PROVISIONERS["relayed"]) as relayed, a_kernel(PROVISIONERS["direct"]) as direct:
        kernels = {"relayed": relayed, "direct": direct}
        for measure, rounds in (
            (question, chosen.messages),
            (empty_cell, chosen.messages // 5),
            (partial(flood, megabytes=chosen.output), chosen.rounds),
        ):
            interleave(rounds, report, *((who, partial(measure, client)) for who, client in kernels.items()))
    question_figure, flood_figure = "ms from request to reply", f"MB/s of output ({chosen.output} MB)"
    added = report.median(f"relayed: {question_figure}") - report.median(f"direct: {question_figure}")
    report.add("relay", {"ms added to each message (aim 0.5)": added / 2})
    report.ratio("request to reply: relayed / direct", f"relayed: {question_figure}", f"direct: {question_figure}")
    report.ratio("output: relayed / direct", f"relayed: {flood_figure}", f"direct: {flood_figure}")
    report.print(as_json=chosen.json)


if __name__ == "__main__":
    main()
