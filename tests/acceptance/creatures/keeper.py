"""Keeps creatures alive inside a session, and looks at each of them whenever it is asked.

A creature is a generator: what it does before its first `yield` brings something to life, and every step after that
asserts that it is still what it was. `yield` gives the word that it is asked with: where the session has been.

`python keeper.py FOLDER [NAME...]`: a file FOLDER/ask-N with a word is answered by FOLDER/answer-N, one JSON object
that says for every creature "" or what is wrong with it.
"""

from __future__ import annotations

import inspect
import itertools
import json
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterable
from pathlib import Path

import files
import ipc
import memory
import network
import processes
import timers

Creature = Generator[None, str, None]
KINDS = (files, ipc, memory, network, processes, timers)
SPECIES: dict[str, Callable[[Path], Creature]] = {
    name: made
    for kind in KINDS
    for name, made in vars(kind).items()
    if inspect.isgeneratorfunction(made) and not name.startswith("_") and made.__module__ == kind.__name__
}


def keep(folder: Path, names: Iterable[str]) -> None:
    creatures = {}
    for name in names:
        creatures[name] = SPECIES[name](folder)
        next(creatures[name])
    for number in itertools.count():
        ask = folder / f"ask-{number}"
        while not ask.exists():
            time.sleep(0.02)
        word = ask.read_text()
        answer = {}
        for name, creature in creatures.items():
            print(word, name, flush=True)  # one that hangs is named last
            answer[name] = look_at(creature, word)
        (folder / "answer.new").write_text(json.dumps(answer))
        (folder / "answer.new").rename(folder / f"answer-{number}")


def look_at(creature: Creature, word: str) -> str:
    try:
        creature.send(word)
    except StopIteration:
        return "it failed before"
    except Exception:  # noqa: BLE001 - whatever is wrong with it is the answer
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    keep(Path(sys.argv[1]), sys.argv[2:] or SPECIES)
