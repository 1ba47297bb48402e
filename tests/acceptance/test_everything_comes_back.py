"""Everything that a process can have is in one session; it is checkpointed, and hibernated and resumed twice."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from tests.acceptance.zoo import KEEPER, Health, Zoo, echoing_server
from tests.installation import Installation

LIFE = ("started", "checkpointed", "hibernated", "hibernated")


def species() -> list[str]:
    """The names of all creatures: the public generators of the files beside the keeper."""
    files = (file for file in sorted(Path(KEEPER).parent.glob("*.py")) if file != KEEPER)
    functions = [
        node for file in files for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)
    ]
    return [node.name for node in functions if node.returns and ast.unparse(node.returns) == "Creature"]


@pytest.fixture(scope="module")
def lives(shared_agent: Installation) -> list[Health]:
    """The health of every creature after each part of its life."""
    with echoing_server() as outside:
        zoo = Zoo(shared_agent, outside)
        found = []
        for word in LIFE:
            if word == "checkpointed":
                shared_agent.operate("zoo", "checkpoint")
            elif word == "hibernated":
                shared_agent.operate("zoo", "hibernate")
                assert shared_agent.client.session("zoo")["pids"] == []
                shared_agent.operate("zoo", "resume")
            found.append(zoo.look(word))
        return found


@pytest.mark.parametrize("name", species())
def test_it_comes_back(lives: list[Health], name: str) -> None:
    assert [life[name] for life in lives] == [""] * len(LIFE)


def test_none_is_forgotten(lives: list[Health]) -> None:
    assert set(lives[0]) == set(species())
