"""A notebook with more memory than is laid out before it runs: it answers, and the rest of its memory follows."""

from __future__ import annotations

from tests.installation import Installation, eventually
from tests.jupyter.conftest import Kernel
from tests.jupyter.talk import run
from tests.jupyter.test_relay_with_agent import hibernate

from torpor.model import Operation
from torpor.sessions.resuming import LAZY_FROM_BYTES

FILL = """
import hashlib, os
memory = bytearray(os.urandom(160 << 20))
was = hashlib.sha256(memory).hexdigest()
def still():
    return hashlib.sha256(memory).hexdigest() == was
"""


def last_operation(installation: Installation, session: str) -> Operation:
    with installation.registry() as registry:
        operation = registry.last_operation(session)
    assert operation is not None
    return operation


def test_a_notebook_answers_and_its_memory_follows(real_kernel: Kernel, installation: Installation) -> None:
    run(real_kernel.client, FILL)
    for cycle in range(3):
        session = hibernate(installation)["id"]
        assert run(real_kernel.client, f"1 + {cycle}").result == str(1 + cycle)
        assert run(real_kernel.client, "still()").result == "True"
        resumed = eventually(lambda name=session: last_operation(installation, name), lambda one: one.ended is not None)
        assert (resumed.kind, resumed.outcome) == ("resume", "completed")
        assert resumed.result is not None
        assert resumed.result["bytes_late"] > LAZY_FROM_BYTES
        assert run(real_kernel.client, "memory[0] ^= 255; was = hashlib.sha256(memory).hexdigest()").status == "ok"
