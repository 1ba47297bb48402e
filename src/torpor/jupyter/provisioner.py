"""The kernel provisioner `torpor`: any kernelspec's command, wrapped in `torpor kernel`.

Chosen by a kernelspec's `metadata.kernel_provisioner.provisioner_name`, or for all kernelspecs without one by
`JUPYTER_DEFAULT_PROVISIONER_NAME=torpor`.
"""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

from jupyter_client.provisioning.local_provisioner import LocalProvisioner

from torpor.jupyter.command import is_wrapped, wrapped

ENDS_WITHIN = 3.0  # seconds for the relay to end its session before it is killed


class TorporProvisioner(LocalProvisioner):
    """Starts the relay in the kernel's place; the relay starts the kernel as a session of the node's agent."""

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Wraps the kernel's command, unless the kernelspec already has."""
        prepared: dict[str, Any] = await super().pre_launch(**kwargs)
        if not is_wrapped(prepared["cmd"]):
            manager: Any = self.parent
            file, metadata = os.path.realpath(manager.connection_file), manager.kernel_spec.metadata
            prepared["cmd"] = wrapped(prepared["cmd"], file, metadata=metadata)
        return prepared

    async def kill(self, restart: bool = False) -> None:
        """Ends the session together with the relay: a relay that is only killed leaves it to the next one."""
        if self.process is not None:
            await self.send_signal(signal.SIGTERM)
            deadline = asyncio.get_running_loop().time() + ENDS_WITHIN
            while await self.poll() is None and asyncio.get_running_loop().time() < deadline:
                await asyncio.sleep(0.02)
        await super().kill(restart=restart)
