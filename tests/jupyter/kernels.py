"""Kernels that know less of Jupyter's transports than ipykernel does, each made of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ipykernel.kernelapp import IPKernelApp


class ColonApp(IPKernelApp):  # type: ignore[misc]
    """Puts a colon in front of every port, as some kernels do whatever the transport."""

    def _try_bind_socket(self, s, port):  # type: ignore[no-untyped-def]
        if self.transport == "ipc":
            s.bind(f"ipc://{self.ip}:{port}")
            return port
        return super()._try_bind_socket(s, port)


def main() -> None:
    """Arguments: `tcp` or `colon`, and ipykernel's."""
    kind = sys.argv.pop(1)
    transport = json.loads(Path(sys.argv[2]).read_text()).get("transport", "tcp")
    if kind == "tcp" and transport != "tcp":
        sys.exit(f"This kernel does not know the transport {transport}.")
    (ColonApp if kind == "colon" else IPKernelApp).launch_instance()


if __name__ == "__main__":
    main()
