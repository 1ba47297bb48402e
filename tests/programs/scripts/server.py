"""An asyncio server that counts, asked by clients from outside; the second argument may be `uvloop`."""

import asyncio
import itertools
import sys

from asked import FOLDER, answer, waits

counter = itertools.count()


async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while line := await reader.readline():
        writer.write(line.strip() + f" {next(counter)}\n".encode())
        await writer.drain()
    writer.close()


async def main() -> None:
    loop = asyncio.get_running_loop()
    assert ("uvloop" in type(loop).__module__) == ("uvloop" in sys.argv)
    server = await asyncio.start_server(reply, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    child = await asyncio.create_subprocess_exec("sleep", "1000")
    ticks: list[float] = []
    ticker = asyncio.create_task(tick(ticks))
    for number in itertools.count():
        while not waits(number):
            await asyncio.sleep(0.02)
        seen = len(ticks)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"hello\n")
        said = await reader.readline()
        writer.close()
        while len(ticks) < seen + 3:
            await asyncio.sleep(0.01)
        (FOLDER / "port").write_text(str(port))

        def check(number: int, said: bytes = said) -> None:
            assert said.startswith(b"hello "), said
            assert int(said.split()[1]) >= number
            assert child.returncode is None
            assert not ticker.done()

        answer(number, check)


async def tick(ticks: list[float]) -> None:
    while True:
        await asyncio.sleep(0.01)
        ticks.append(asyncio.get_running_loop().time())
        assert ticks == sorted(ticks)


if "uvloop" in sys.argv:
    import uvloop

    uvloop.run(main())
else:
    asyncio.run(main())
