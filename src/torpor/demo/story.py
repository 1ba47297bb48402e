"""The demonstration: a real notebook goes to sleep and wakes, and nothing in it can tell.

A plain run of the notebook's code comes first; what it computes is what the notebook must compute, bit for bit, with
a hibernation in the middle.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from torpor.client import Client, Json
from torpor.demo import machine, notebook
from torpor.demo.household import Household, raise_leftovers
from torpor.demo.lab import Answer, KernelConnection, Lab, find_server, new_token, server_command
from torpor.demo.timeline import Timeline, size
from torpor.errors import AgentUnreachable, NotPermitted, SetupError, TorporError
from torpor.paths import Paths, from_environment

IDLE_AFTER = 4  # seconds
POLICY = f'[policy]\nidle_after = "{IDLE_AFTER}s"\ncpu_window = "2s"\ncpu_threshold = 0.05\n'
FILE = "training.ipynb"
KERNEL_WITHIN = 60.0
ASLEEP_WITHIN = 180.0  # seconds: far more than it takes, so that a slow machine is not called a failure


@dataclass
class Figures:
    """What the demonstration found. Sizes are bytes, times seconds."""

    library: str = ""
    bytes_data: int = 0
    processes: int = 0
    bytes_resident: int = 0
    bytes_available_awake: int = 0
    bytes_available_asleep: int = 0
    bytes_stored: int = 0
    seconds_hibernate: float = 0.0
    seconds_first_output: float = 0.0
    seconds_reply: float = 0.0
    losses_expected: list[str] | None = None
    losses: list[str] | None = None
    identical: bool = False

    def as_data(self) -> Json:
        """Everything as JSON values; losses are hexadecimal floats."""
        return asdict(self)


def tell(timeline: Timeline, figures: Figures) -> None:
    """Plays the whole demonstration and fills `figures`.

    Raises NotPermitted or SetupError when it cannot be played here, TorporError when something in it is not as
    promised. Whatever happens, Ctrl-C included, nothing that it started remains.
    """
    _require_stage()
    household = Household()
    with household:
        try:
            _play(timeline, figures, household)
        finally:
            timeline.heading("Ending everything …")
    raise_leftovers(household)
    timeline.note("✓", "clean", "no process, no mount and no file of it remains")


def _require_stage() -> None:
    if os.geteuid() != 0:
        raise NotPermitted("The demonstration starts an agent of its own, which needs root.", hint="sudo torpor demo")
    missing = [name for name in ("jupyterlab", "ipykernel", "numpy") if importlib.util.find_spec(name) is None]
    if missing:
        hint = f"{sys.executable} -m pip install {' '.join(missing)}"
        raise SetupError(f"The demonstration needs {', '.join(missing)} beside Torpor.", hint=hint)


def _play(timeline: Timeline, figures: Figures, household: Household) -> None:
    cells = notebook.cells(torch=importlib.util.find_spec("torch") is not None)
    figures.library = cells.library
    env = environment(household)
    with timeline.step("uninterrupted", f"Running the notebook's code with {cells.library} in a plain process") as step:
        figures.losses_expected = _plain_run(cells, env)
        step.text = f"{len(figures.losses_expected)} losses of a plain {cells.library} process, to compare with"
    client = _start_agent(timeline, household, env)
    lab = _start_lab(timeline, household, env)
    with timeline.step("notebook", "Opening the notebook") as step:
        lab.save_notebook(FILE, cells.as_notebook())
        kernel_id = lab.open_notebook(FILE)
        session = _kernel_session(client)
        step.text = f"{FILE} is open; its kernel is the session {session['name']}"
    load, train, train_on = lab.read_cells(FILE)
    with lab.connect(kernel_id) as kernel:
        _work(timeline, figures, kernel, load, train)
        _fall_asleep(timeline, figures, client, session["id"])
        if lab.kernel_state(kernel_id) != "idle":
            raise TorporError(f"JupyterLab calls the sleeping kernel {lab.kernel_state(kernel_id)!r}, not idle.")
        timeline.note("z", "JupyterLab", "still shows the kernel as idle; the notebook's connection is open")
        _wake(timeline, figures, kernel, train_on)
    _compare(timeline, figures)
    lab.shut_down(kernel_id)
    client.remove(session["id"], force=True)


def environment(household: Household) -> dict[str, str]:
    """The caller's environment with every folder that Jupyter, IPython and Torpor write to in the household."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("JUPYTER", "JPY_"))}
    folders = {
        "TORPOR_HOME": "",
        "TMPDIR": "tmp",
        "JUPYTER_CONFIG_DIR": "jupyter/config",
        "JUPYTER_DATA_DIR": "jupyter/data",
        "JUPYTER_RUNTIME_DIR": "jupyter/runtime",
        "JUPYTERLAB_SETTINGS_DIR": "jupyter/lab/settings",
        "JUPYTERLAB_WORKSPACES_DIR": "jupyter/lab/workspaces",
        "IPYTHONDIR": "ipython",
    }
    for name, folder in folders.items():
        path = household.home / folder
        path.mkdir(parents=True, exist_ok=True)
        env[name] = str(path)
    (household.home / "notebooks").mkdir()
    return env


def _plain_run(cells: notebook.Cells, env: dict[str, str]) -> list[str]:
    program = [sys.executable, "-c", cells.as_script()]
    ran = subprocess.run(program, env=env, capture_output=True, text=True, timeout=300, check=False)
    found = notebook.losses(ran.stdout)
    if ran.returncode != 0 or len(found) != 2 * notebook.STEPS:
        raise SetupError(f"The notebook's code does not run in a plain process: {ran.stderr.strip()[-500:]}")
    return found


def _start_agent(timeline: Timeline, household: Household, env: dict[str, str]) -> Client:
    paths: Paths = from_environment(env)
    paths.config.write_text(POLICY)
    client = Client(paths)

    def answers() -> bool:
        try:
            client.node()
        except AgentUnreachable:
            return False
        return True

    with timeline.step("torpor up", "Starting the agent") as step:
        program = [sys.executable, "-c", "from torpor.cli import main; main()", "up"]
        agent = household.start("agent", program, env)
        household.wait_until("The agent", answers, agent, "agent")
        step.text = f"agent with pid {agent.pid}; policy: hibernate after {IDLE_AFTER} s of idleness"
    return client


def _start_lab(timeline: Timeline, household: Household, env: dict[str, str]) -> Lab:
    token = new_token()
    found: list[Lab] = []

    def answers() -> bool:
        lab = find_server(household.home / "jupyter" / "runtime", token)
        found.extend([lab] if lab is not None else [])
        return bool(found)

    with timeline.step("jupyter lab", "Starting JupyterLab") as step:
        server_env = {**env, "JUPYTER_TOKEN": token, "JUPYTER_DEFAULT_PROVISIONER_NAME": "torpor"}
        server = household.start("jupyterlab", server_command(household.home / "notebooks"), server_env)
        household.wait_until("JupyterLab", answers, server, "jupyterlab")
        step.text = f"JupyterLab with pid {server.pid}, JUPYTER_DEFAULT_PROVISIONER_NAME=torpor"
    return found[0]


def _kernel_session(client: Client) -> Json:
    """The session that the notebook's kernel became; the relay makes it while the kernel starts."""
    deadline = time.monotonic() + KERNEL_WITHIN
    while time.monotonic() < deadline:
        kernels = [session for session in client.sessions() if session["kind"] == "kernel"]
        if kernels:
            return _wait_for_state(client, kernels[0]["id"], "running")
        time.sleep(0.05)
    raise TorporError("The notebook's kernel did not become a session of the agent.")


def _work(timeline: Timeline, figures: Figures, kernel: KernelConnection, load: str, train: str) -> None:
    with timeline.step("cell 1", "Loading data") as step:
        figures.bytes_data = notebook.data_bytes(kernel.run(load).printed)
        step.text = f"loads {size(figures.bytes_data)} of data"
    with timeline.step("cell 2", "Training") as step:
        figures.losses = notebook.losses(kernel.run(train).printed)
        step.text = f"trains {len(figures.losses)} steps; last loss {_decimal(figures.losses)}"


def _fall_asleep(timeline: Timeline, figures: Figures, client: Client, ref: str) -> None:
    session = client.session(ref)
    processes = machine.identify(session["pids"])
    figures.processes = len(processes)
    figures.bytes_resident = machine.resident_bytes(pid for pid, _ in processes)
    figures.bytes_available_awake = machine.memory_available()
    pids = ", ".join(str(pid) for pid, _ in processes)
    timeline.note("·", "memory", f"{size(figures.bytes_resident)} held by {figures.processes} processes ({pids})")
    with timeline.step("idle", "Nobody touches the notebook any more") as step:
        step.text = _wait_for_timer(client, session, step.show)
    with timeline.step("hibernate", "Saving the session, verifying, ending its processes", mark="z") as step:
        _wait_for_state(client, ref, "hibernated")
        checkpoint = client.checkpoints(ref)[0]
        figures.bytes_stored = checkpoint["bytes_stored"]
        figures.seconds_hibernate = checkpoint["seconds"].get("total", 0.0)
        step.text = f"{size(checkpoint['bytes_logical'])} saved and verified, {size(figures.bytes_stored)} on disk"
    left = machine.still_there(processes)
    if left:
        raise TorporError(f"Processes of the hibernated session are still there: {left}.")
    figures.bytes_available_asleep = machine.settled_memory_available()
    gained = figures.bytes_available_asleep - figures.bytes_available_awake
    timeline.note(
        "z",
        "asleep",
        f"{figures.processes} of {figures.processes} processes gone; available memory "
        f"{size(figures.bytes_available_awake)} → {size(figures.bytes_available_asleep)} ({size(gained)} given back)",
    )


def _wait_for_timer(client: Client, session: Json, show: Any) -> str:
    """Returns the last verdict's sentence once the timer has begun to hibernate the session."""
    sentence, deadline = "", time.monotonic() + ASLEEP_WITHIN
    while session["state"] == "running":
        if time.monotonic() > deadline:
            raise TorporError(f"The timer did not hibernate the session. {client.why(session['id'])['sentence']}")
        sentence = session["verdict"]["sentence"]
        show(sentence)
        session = client.watch(session["id"], session["version"], timeout=0.5)
    return sentence


def _wait_for_state(client: Client, ref: str, state: str) -> Json:
    deadline = time.monotonic() + ASLEEP_WITHIN
    session = client.session(ref)
    while session["state"] != state:
        if session["error"] or session["state"] in ("failed", "ended") or time.monotonic() > deadline:
            reason = (session["error"] or {}).get("message", "it took too long")
            raise TorporError(f"The session is {session['state']} instead of {state}: {reason}")
        session = client.watch(ref, session["version"], timeout=1.0)
    return session


def _wake(timeline: Timeline, figures: Figures, kernel: KernelConnection, train_on: str) -> None:
    with timeline.step("cell 3", "Running the next cell", mark="✓") as step:
        answer: Answer = kernel.run(train_on)
        figures.seconds_first_output = answer.first_output or answer.replied
        figures.seconds_reply = answer.replied
        losses = notebook.losses(answer.printed)
        figures.losses = [*(figures.losses or []), *losses]
        step.text = (
            f"wakes the session and trains {len(losses)} steps more; first output after "
            f"{figures.seconds_first_output:.2f} s, last loss {_decimal(losses)}"
        )


def _compare(timeline: Timeline, figures: Figures) -> None:
    figures.identical = figures.losses == figures.losses_expected
    if not figures.identical:
        raise TorporError(
            f"The losses differ from the uninterrupted run: {figures.losses}, expected {figures.losses_expected}."
        )
    timeline.note(
        "✓", "identical", f"all {len(figures.losses or [])} losses equal the uninterrupted run's, bit for bit"
    )


def _decimal(losses: list[str]) -> str:
    return f"{float.fromhex(losses[-1]):.6f}" if losses else "none"
