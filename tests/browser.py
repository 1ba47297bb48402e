"""Debian's Chromium without a screen, told what to do as a person would: over its DevTools protocol."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import subprocess
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import websocket
from tests.installation import PATIENCE, eventually

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1400,1000",
    "--remote-debugging-port=0",
)
KEYS = {"Enter": 13, "End": 35, "Tab": 9, "Escape": 27, "ArrowRight": 39, "s": 83}
TEXT_OF_KEYS = {"Enter": "\r"}
CONTROL = 2  # a modifier
Json = dict[str, Any]


class Browser:
    """One Chromium with a profile of its own; `close` leaves nothing of it."""

    def __init__(self) -> None:
        self._profile = Path(tempfile.mkdtemp(prefix="torpor-chromium-"))
        with open(self._profile / "log", "wb") as log:
            self._process = subprocess.Popen(
                ["chromium", *FLAGS, f"--user-data-dir={self._profile}", "about:blank"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._port = eventually(self._find_port, bool)
        self._pages: list[Page] = []

    def open(self, url: str) -> Page:
        """A new tab."""
        request = urllib.request.Request(f"http://127.0.0.1:{self._port}/json/new?{url}", method="PUT")
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            page = Page(json.load(answer)["webSocketDebuggerUrl"])
        self._pages.append(page)
        return page

    def close_pages(self) -> None:
        """All tabs that were opened."""
        while self._pages:
            self._pages.pop().close()

    def close(self) -> None:
        """Ends the browser."""
        self.close_pages()
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(timeout=PATIENCE)
        shutil.rmtree(self._profile, ignore_errors=True)  # its helpers may still be putting things away

    def _find_port(self) -> int:
        assert self._process.poll() is None, (self._profile / "log").read_text()
        try:
            return int((self._profile / "DevToolsActivePort").read_text().split()[0])
        except (FileNotFoundError, IndexError):
            return 0


class Page:
    """One tab. `find` in its methods is a JavaScript expression for an element."""

    def __init__(self, url: str) -> None:
        self._socket = websocket.create_connection(url, timeout=PATIENCE, suppress_origin=True)
        self._numbers = itertools.count(1)
        self.call("Page.enable")
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)  # each tab works as if it were in front

    def call(self, method: str, **parameters: Any) -> Json:
        """One command of the protocol; leaving an unsaved notebook is confirmed."""
        message = self._ask(method, parameters)
        assert "error" not in message, f"{method}: {message['error']}"
        return dict(message["result"])

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; None when it fails, as it does while the page is loading."""
        answer = self._ask("Runtime.evaluate", {"expression": expression, "returnByValue": True}).get("result", {})
        return None if "exceptionDetails" in answer else answer.get("result", {}).get("value")

    def wait(self, expression: str) -> None:
        """Waits until the expression is true."""
        eventually(lambda: self.evaluate(f"!!({expression})"), bool)

    def reload(self) -> None:
        """Loads the page anew, and waits until nothing is left of what it showed."""
        self.evaluate("window.isOld = true")
        self.call("Page.reload")
        self.wait("!window.isOld && document.readyState == 'complete'")

    def click(self, find: str) -> None:
        """Clicks into the middle of an element, once it is there and has come to rest."""
        place = f"(at => [at.x + at.width / 2, at.y + at.height / 2])(({find}).getBoundingClientRect())"
        self.wait(f"({find}).scrollIntoView({{block: 'center'}}) || ({find}).getBoundingClientRect().width > 0")
        x, y = eventually(lambda: self.evaluate(place), lambda seen: bool(seen) and seen == self.evaluate(place))
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Types text where the cursor is."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        """Presses one key."""
        facts = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key], "modifiers": modifiers}
        text = {} if modifiers or key not in TEXT_OF_KEYS else {"text": TEXT_OF_KEYS[key]}
        self.call("Input.dispatchKeyEvent", type="keyDown", **facts, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **facts)

    def close(self) -> None:
        """Closes the tab, as with its cross."""
        self._send("Page.close", {})
        self._socket.close()

    def _ask(self, method: str, parameters: Json) -> Json:
        number = self._send(method, parameters)
        while True:
            message: Json = json.loads(self._socket.recv())
            if message.get("method") == "Page.javascriptDialogOpening":
                self._send("Page.handleJavaScriptDialog", {"accept": True})
            elif message.get("id") == number:
                return message

    def _send(self, method: str, parameters: Json) -> int:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        return number
