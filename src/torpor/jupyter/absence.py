"""What becomes of requests while the kernel cannot take them."""

from __future__ import annotations

from collections.abc import Callable

from torpor.jupyter.ledger import Ledger
from torpor.jupyter.memory import Memory
from torpor.jupyter.policy import CommJudge, Effect, effect, effect_at_work
from torpor.jupyter.voice import Voice
from torpor.jupyter.waking import Waking
from torpor.jupyter.wire import Message


class Absence:
    """Answers requests from memory, holds them, or does what they ask for. `shut_down` ends the session."""

    def __init__(
        self,
        waking: Waking,
        voice: Voice,
        memory: Memory,
        ledger: Ledger,
        comms: CommJudge,
        shut_down: Callable[[], None],
    ) -> None:
        self._waking = waking
        self._voice = voice
        self._memory = memory
        self._ledger = ledger
        self._comms = comms
        self._shut_down = shut_down

    def take(self, channel: str, message: Message, *, at_work: bool) -> None:
        """One request; `at_work` tells whether the kernel was saved in the middle of something."""
        meaning = effect(message, self._comms)
        if at_work:
            if meaning is Effect.INTERRUPT:
                self._waking.cancel_cells()
            meaning = effect_at_work(meaning, channel)
        match meaning:
            case Effect.SHUTDOWN:
                self._voice.shutdown(channel, message)
                self._shut_down()
            case Effect.INTERRUPT:
                self._voice.reply(channel, message, "interrupt_reply", {"status": "ok"})
                self._waking.cancel_cells()
            case Effect.ANSWER if answer := self._memory.answer(message):
                self._voice.reply(channel, message, *answer)
                self._ledger.replied(message.header.msg_id)
                self._voice.state("busy" if at_work or self._waking.held.first_visible_cell() else "idle")
            case what:
                self._waking.hold(channel, message, wakes=what is Effect.WAKE)
