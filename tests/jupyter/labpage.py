"""A JupyterLab server, and a notebook in it as a page shows it."""

from __future__ import annotations

import json
import secrets
import signal
import socket
import subprocess
import sys
import urllib.parse
from pathlib import Path
from typing import Any

import nbformat
from tests.browser import CONTROL, Browser, Page
from tests.installation import PATIENCE, eventually


class LabServer:
    """JupyterLab with its own folders below `home`, all of whose kernels are Torpor's."""

    def __init__(self, home: Path, environment: dict[str, str]) -> None:
        self.home = home
        self._environment = {**environment, "JUPYTER_DEFAULT_PROVISIONER_NAME": "torpor"}
        for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
            folder = home / name.lower()
            folder.mkdir(mode=0o700, parents=True)
            self._environment[name] = str(folder)
        settings = home / "jupyter_config_dir" / "labconfig"
        settings.mkdir()
        quiet = {"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}
        (settings / "page_config.json").write_text(json.dumps(quiet))
        self.token = secrets.token_hex(16)

    def start(self) -> None:
        """Starts the server and waits until it serves."""
        options = ["--ip=127.0.0.1", "--port=0", "--allow-root", f"--ServerApp.root_dir={self.home}"]
        options.append("--LabApp.extension_manager=readonly")
        with open(self.home / "server.log", "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jupyterlab", "--no-browser", *options],
                env={**self._environment, "JUPYTER_TOKEN": self.token},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.url = eventually(self._find_url, bool)
        eventually(self._answers, bool)  # its file comes before it listens

    def kill(self) -> None:
        """kill -9: nobody is told anything."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=PATIENCE)

    def write(self, name: str, *cells: str) -> None:
        """A notebook file with these cells."""
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(notebook, self.home / name)

    def address(self, name: str) -> str:
        """Where a notebook is opened, with nothing else beside it."""
        return f"{self.url}doc/tree/{name}?token={self.token}"

    def _answers(self) -> bool:
        address = urllib.parse.urlsplit(self.url)
        with socket.socket() as trial:
            return trial.connect_ex((address.hostname, address.port)) == 0

    def _find_url(self) -> str:
        assert self.process.poll() is None, (self.home / "server.log").read_text()
        try:
            facts: dict[str, Any] = json.loads(
                (self.home / f"jupyter_runtime_dir/jpserver-{self.process.pid}.json").read_text()
            )
        except (FileNotFoundError, ValueError):
            return ""
        return str(facts["url"])


class NotebookPage:
    """One tab with one notebook; cells are numbered from 0."""

    def __init__(self, browser: Browser, address: str) -> None:
        self.page: Page = browser.open(address)
        self.wait_until_open()

    def wait_until_open(self) -> None:
        """Until the page shows the notebook, connected to its kernel."""
        self.page.wait(f"{_cell(0)}?.querySelector('.cm-content') && !document.querySelector('.jp-Spinner')")
        self.wait_for_kernel("Idle")

    def wait_for_kernel(self, status: str) -> None:
        """Until the status bar shows this state of the kernel."""
        self.page.wait(f"document.querySelector('#jp-main-statusbar')?.textContent.includes('| {status}')")

    def save(self) -> None:
        """With the keyboard, and waits until it is done."""
        self.page.press("s", CONTROL)
        self.page.wait("!document.querySelector('.jp-mod-dirty')")

    def reload(self) -> None:
        """As with the browser's button."""
        self.page.reload()
        self.wait_until_open()

    def run(self, cell: int) -> None:
        """Runs a cell; returns at once."""
        self.put_cursor(cell)
        self.page.press("Enter", CONTROL)

    def put_cursor(self, cell: int) -> None:
        """Into a cell's text, at its end."""
        self.page.click(f"{_cell(cell)}.querySelector('.cm-line:last-child')")
        self.page.wait(f"{_cell(cell)}.contains(document.activeElement)")
        self.page.press("End", CONTROL)

    def source(self, cell: int) -> str:
        """The code in a cell."""
        return str(self.page.evaluate(f"{_cell(cell)}.querySelector('.cm-content').textContent") or "")

    def output(self, cell: int) -> str:
        """All that a cell's output area shows."""
        find = f"[...{_cell(cell)}.querySelectorAll('.jp-OutputArea-output')].map(one => one.textContent).join('')"
        return str(self.page.evaluate(find) or "")

    def wait_for_output(self, cell: int, wanted: str) -> None:
        """Until a cell shows exactly this."""
        eventually(lambda: self.output(cell), wanted.__eq__)

    def choose(self, menu: str, command: str) -> None:
        """Chooses an entry of a menu with the mouse, and says yes when the page asks back."""
        bar = "[...document.querySelectorAll('.lm-MenuBar-item')]"
        self.page.click(f"{bar}.find(one => one.textContent == '{menu}')")
        self.page.click(f"document.querySelector('.lm-Menu-item[data-command=\"{command}\"]')")

    def accept(self) -> None:
        """Says yes to what the page asks."""
        self.page.click("document.querySelector('.jp-Dialog .jp-mod-accept')")
        self.page.wait("!document.querySelector('.jp-Dialog')")


def _cell(number: int) -> str:
    return f"document.querySelectorAll('.jp-Notebook .jp-Cell')[{number}]"
