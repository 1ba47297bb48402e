"""nbclient's own tests, as its makers wrote them, with every kernel a session."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from tests.installation import Installation

FETCHED = Path(sys.prefix) / "nbclient-tests"
OPTIONS = ("-p", "no:cacheprovider", "-p", "no:timeout", "-o", "asyncio_default_fixture_loop_scope=function")


def test_all_pass_with_torpor(installation: Installation, home: Path) -> None:
    report = home / "report.xml"
    with open(home / "pytest.log", "w+") as log:
        status = subprocess.run(
            [sys.executable, "-m", "pytest", "--junit-xml", str(report), *OPTIONS],
            cwd=FETCHED / "source",
            env={
                **os.environ,
                "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
                "PYTHONPATH": f"{FETCHED / 'packages'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
                "JUPYTER_DEFAULT_PROVISIONER_NAME": "torpor",
            },
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        ).returncode
        log.seek(0)
        assert status == 0, log.read()
    suite = ElementTree.parse(report).getroot()[0]
    assert int(suite.attrib["tests"]) > 100
    assert int(suite.attrib["skipped"]) == 0
    with installation.registry() as registry:
        kernels = [session for session in registry.sessions() if session.kind == "kernel"]
    assert len(kernels) > 50
