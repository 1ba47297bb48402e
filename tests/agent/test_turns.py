"""One user's long work leaves the others their turn."""

from __future__ import annotations

import asyncio

from torpor.agent.turns import Turns


def test_a_user_has_only_so_many_turns_at_once_and_others_have_theirs() -> None:
    async def play() -> list[str]:
        turns, log, go = Turns(1), [], asyncio.Event()

        async def take(uid: int, name: str) -> None:
            async with turns.turn(uid):
                log.append(f"{name} begins")
                await go.wait()
                log.append(f"{name} ends")

        players = [
            asyncio.create_task(take(1, "a")),
            asyncio.create_task(take(1, "b")),
            asyncio.create_task(take(2, "c")),
        ]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        log.append("go")
        go.set()
        await asyncio.gather(*players)
        return log

    log = asyncio.run(play())
    assert log.index("b begins") > log.index("a ends") > log.index("go")
    assert log.index("c begins") < log.index("go")


def test_a_failed_turn_is_given_back() -> None:
    async def play() -> bool:
        turns = Turns(1)
        for _ in range(2):
            try:
                async with turns.turn(1):
                    raise ValueError
            except ValueError:
                continue
        return True

    assert asyncio.run(play())
