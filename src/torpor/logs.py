"""What Torpor's processes log: names and words of users in it are shown, never obeyed by a terminal."""

from __future__ import annotations

import logging
import sys

from torpor.text import shown, shown_lines


class PlainFormatter(logging.Formatter):
    """One line for a message, whatever is in it; a traceback keeps its lines."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as text."""
        plain = logging.makeLogRecord({**record.__dict__, "msg": shown(record.getMessage()), "args": None})
        return shown_lines(super().format(plain))


def configure(level: str) -> None:
    """Logs to standard error from here on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PlainFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
