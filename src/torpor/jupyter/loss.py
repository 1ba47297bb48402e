"""A kernel that died and went on from an older checkpoint: what is lost is said where its user sees it."""

from __future__ import annotations

from torpor.jupyter.agent_link import Seen
from torpor.jupyter.policy import is_silent
from torpor.jupyter.voice import Voice
from torpor.jupyter.wire import Message

INTERRUPTED = "The session was taken away while this request was under way."
DIED = "The kernel died, and goes on from its last checkpoint."


class Loss:
    """Remembers a loss until a cell could show it."""

    def __init__(self, voice: Voice) -> None:
        self._voice = voice
        self._sentence: str | None = None
        self._known_lease = -1
        self._untold = False

    def seen(self, session: Seen) -> None:
        """Takes note of a session that came back; each return counts once."""
        if session.lease != self._known_lease:
            self._known_lease, self._sentence = session.lease, session.lost
            self._untold = session.lost is not None

    @property
    def reason(self) -> str:
        """Why a request that was under way gets no answer of its own."""
        return f"{DIED} {self._sentence}" if self._sentence else INTERRUPTED

    def tell(self, request: Message) -> None:
        """Says it once, in the output area of the first cell that runs afterwards."""
        is_visible = request.header.msg_type == "execute_request" and not is_silent(request)
        if self._untold and is_visible:
            self._untold = False
            text = f"{self.reason} Run again what came after that.\n"
            self._voice.publish("stream", {"name": "stderr", "text": text}, request.raw_header)
