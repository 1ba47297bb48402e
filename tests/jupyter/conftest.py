from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager
from jupyter_client.provisioning.factory import KernelProvisionerFactory
from tests.installation import Installation
from tests.jupyter.standin import StandInAgent


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A TORPOR_HOME with a short path, for sockets, that is also where Jupyter keeps its files."""
    folder = Path(tempfile.mkdtemp(prefix="torpor-"))
    monkeypatch.setenv("TORPOR_HOME", str(folder))
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        path = folder / name.lower()
        path.mkdir(mode=0o700)
        monkeypatch.setenv(name, str(path))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def agent(home: Path) -> Iterator[StandInAgent]:
    """Takes the place of the running agent that other tests get under this name."""
    agent = StandInAgent(home)
    agent.start()
    yield agent
    agent.stop()


@pytest.fixture
def torpor_by_default(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """JUPYTER_DEFAULT_PROVISIONER_NAME=torpor, as a notebook server started with it sees the world."""
    monkeypatch.setenv("JUPYTER_DEFAULT_PROVISIONER_NAME", "torpor")
    KernelProvisionerFactory.clear_instance()
    yield
    KernelProvisionerFactory.clear_instance()


class Kernel:
    """A kernel manager and a client, as any program that uses Jupyter has them."""

    def __init__(self, kernel_name: str = "python3", **settings: Any) -> None:
        connection_file = Path(os.environ["JUPYTER_RUNTIME_DIR"]) / f"kernel-{uuid.uuid4()}.json"
        self.manager = KernelManager(kernel_name=kernel_name, connection_file=str(connection_file), **settings)
        self._clients: list[BlockingKernelClient] = []

    def start(self, **settings: Any) -> BlockingKernelClient:
        self.manager.start_kernel(**settings)
        self.client = self.connect()
        return self.client

    def connect_early(self) -> BlockingKernelClient:
        """Starts the kernel; the answer is a client that has not waited for it."""
        self.manager.start_kernel()
        self.client = self.connect(wait=False)
        return self.client

    def connect(self, *, wait: bool = True) -> BlockingKernelClient:
        """A client with a session id of its own; two of one manager's are one to a kernel."""
        client = BlockingKernelClient(connection_file=self.manager.connection_file)
        client.load_connection_file()
        client.hb_channel.time_to_dead = 10.0  # a machine that is busy with other tests is no dead kernel
        client.start_channels()
        self._clients.append(client)
        if wait:
            client.wait_for_ready(timeout=60)
        return client

    def close(self) -> None:
        for client in self._clients:
            client.stop_channels()
        if self.manager.has_kernel:
            self.manager.shutdown_kernel(now=True)
        self.manager.context.destroy(linger=0)


@pytest.fixture
def kernel(agent: StandInAgent, torpor_by_default: None) -> Iterator[Kernel]:
    kernel = Kernel()
    kernel.start()
    yield kernel
    kernel.close()


@pytest.fixture
def installation(home: Path, shared_agent: Installation, monkeypatch: pytest.MonkeyPatch) -> Installation:
    """The real agent, shared by the tests of a file; kernels that are started find it."""
    monkeypatch.setenv("TORPOR_HOME", str(shared_agent.home))
    return shared_agent


@pytest.fixture
def tcp_kernel(installation: Installation, torpor_by_default: None) -> Iterator[Kernel]:
    """A kernel whose kernelspec says that it knows nothing but TCP."""
    kernel = Kernel()
    kernel.manager.kernel_spec.metadata["torpor"] = {"transport": "tcp"}
    kernel.start()
    yield kernel
    kernel.close()


@pytest.fixture
def real_kernel(installation: Installation, torpor_by_default: None) -> Iterator[Kernel]:
    kernel = Kernel()
    kernel.start()
    yield kernel
    kernel.close()
