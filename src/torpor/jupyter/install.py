"""Puts the relay into kernelspecs, and takes it out again so exactly that nothing shows that it was there.

A kernelspec's command is wrapped (`argv`), not its provisioner named: every client honours the command, and some
(VS Code) ignore provisioners. A kernelspec that may not be written is copied to where it may.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torpor.errors import NotFound, NotPermitted, SetupError
from torpor.jupyter.command import is_wrapped, relay_command, wrapped

SPEC = "kernel.json"
ORIGINAL = "kernel.json.before-torpor"
FORMAT = 1
NATIVE = "python3"
_PYTHON = re.compile(r"python(?:3(?:\.\d+)?)?")

Spec = dict[str, Any]


@dataclass(frozen=True)
class Change:
    """What was done to one kernelspec: `added`, `copied`, `shadowed` (copied, but Jupyter finds another one first),
    `unchanged`, `restored` or `removed` (a copy)."""

    kernel: str
    folder: Path
    done: str


def kernel_names() -> list[str]:
    """All kernelspecs that Jupyter finds here."""
    return sorted(_manager().find_kernel_specs())


def install(names: Iterable[str], destination: Path | None = None) -> list[Change]:
    """Wraps the commands of these kernelspecs; in place, unless it may not be written or `destination` is given.

    `destination` is a folder of kernelspecs. Doing it again changes nothing. Raises NotFound for a kernel that Jupyter
    does not know, NotPermitted where nothing may be written, SetupError when no place is left that Jupyter would use.
    """
    return [_install(name, destination) for name in names]


def undo(names: Iterable[str] | None = None, destination: Path | None = None) -> list[Change]:
    """Restores these kernelspecs (None: all that were changed) wherever Jupyter looks for them."""
    wanted = None if names is None else {name.lower() for name in names}
    roots = [Path(root) for root in _manager().kernel_dirs] if destination is None else [destination]
    folders = [folder for root in roots if root.is_dir() for folder in sorted(root.iterdir())]
    return [
        _restore(folder)
        for folder in folders
        if (wanted is None or folder.name.lower() in wanted) and _record_of(_read(folder / SPEC))
    ]


def user_kernels() -> Path:
    """Where this user's own kernelspecs are."""
    from jupyter_core.paths import jupyter_data_dir

    return Path(jupyter_data_dir()) / "kernels"


def prefix_kernels(prefix: Path) -> Path:
    """Where the kernelspecs of an environment or installation are."""
    return prefix / "share" / "jupyter" / "kernels"


def _install(name: str, destination: Path | None) -> Change:
    folder, spec = _find(name)
    chosen = destination or (folder.parent if _is_writable(folder) else user_kernels())
    target = chosen / name
    if (target / SPEC).exists():
        return Change(name, target, _wrap_in_place(target))
    if _record_of(spec):
        return Change(name, folder, "unchanged")
    _copy(folder, target, _wrapped_spec(spec, folder, copied_from=str(folder)))
    used = _find(name)[0]
    if used.resolve() == target.resolve():
        return Change(name, target, "copied")
    if destination:
        return Change(name, target, "shadowed")
    shutil.rmtree(target)
    raise SetupError(
        f"{folder} may not be written, and a copy in {target} would not be used: Jupyter looks for it later.",
        safe="Nothing was changed.",
        hint="Run it as a user who may write there, or choose a place with --user, --sys-prefix or --prefix.",
    )


def _wrap_in_place(folder: Path) -> str:
    content = (folder / SPEC).read_bytes()
    spec: Spec = json.loads(content)
    record = _record_of(spec)
    if record and list(spec["argv"][: len(relay_command())]) == relay_command():
        return "unchanged"
    if record:
        spec["argv"] = wrapped(_with_absolute_python(record["argv"], folder), metadata=spec["metadata"])
        _write(folder / SPEC, _rendered(spec))
        return "added"
    if is_wrapped(spec["argv"]):
        return "unchanged"  # somebody wrote the relay into it by hand
    _write(folder / ORIGINAL, content)
    _write(folder / SPEC, _rendered(_wrapped_spec(spec, folder)))
    return "added"


def _restore(folder: Path) -> Change:
    if not _is_writable(folder):
        raise NotPermitted(f"{folder} may not be written by this user.", safe="It was left as it is.")
    spec: Spec = json.loads((folder / SPEC).read_bytes())
    record = _record_of(spec)
    assert record
    if record.get("copied_from"):
        shutil.rmtree(folder)
        return Change(folder.name, folder, "removed")
    original = folder / ORIGINAL
    plain = _unwrapped(spec, record)
    if _without_empty(_read(original) or {}) == _without_empty(plain):
        original.rename(folder / SPEC)
    else:  # somebody changed the kernelspec since: what they changed stays
        _write(folder / SPEC, _rendered(plain))
        original.unlink(missing_ok=True)
    return Change(folder.name, folder, "restored")


def _wrapped_spec(spec: Spec, folder: Path, **facts: str) -> Spec:
    metadata = spec.get("metadata", {})
    wishes = metadata.get("torpor") or {}
    record = {**wishes, "format": FORMAT, "argv": spec["argv"], **facts}
    argv = wrapped(_with_absolute_python(spec["argv"], folder), metadata=metadata)
    changed = {**spec, "argv": argv, "metadata": {**metadata, "torpor": record}}
    home = os.environ.get("TORPOR_HOME")
    if home:
        changed["env"] = {**spec.get("env", {}), "TORPOR_HOME": str(Path(home).absolute())}
        record["env"] = spec.get("env")
    return changed


def _unwrapped(spec: Spec, record: dict[str, Any]) -> Spec:
    metadata = {key: value for key, value in spec["metadata"].items() if key != "torpor"}
    if "transport" in record:
        metadata["torpor"] = {"transport": record["transport"]}
    plain = {**spec, "argv": record["argv"], "metadata": metadata}
    if "env" in record:
        environment = {key: value for key, value in spec.get("env", {}).items() if key != "TORPOR_HOME"}
        plain["env"] = environment or record["env"] or {}
    return plain


def _without_empty(spec: Spec) -> Spec:
    return {key: value for key, value in spec.items() if value or key not in ("metadata", "env")}


def _with_absolute_python(argv: list[str], folder: Path) -> list[str]:
    """Jupyter runs `python` of a kernelspec with its own interpreter; inside the relay's command nobody would."""
    if not _PYTHON.fullmatch(argv[0]):
        return argv
    prefix = folder.parents[3] if folder.parts[-4:-1] == ("share", "jupyter", "kernels") else None
    beside = prefix / "bin" / "python" if prefix else None
    return [str(beside) if beside and beside.exists() else sys.executable, *argv[1:]]


def _find(name: str) -> tuple[Path, Spec]:
    from jupyter_client.kernelspec import NoSuchKernel

    try:
        spec = _manager().get_kernel_spec(name)
    except NoSuchKernel as error:
        known = ", ".join(kernel_names())
        raise NotFound(f"Jupyter knows no kernel {name!r} here.", hint=f"It knows: {known}.") from error
    folder = Path(spec.resource_dir)
    return folder, _read(folder / SPEC) or json.loads(spec.to_json())


def _manager() -> Any:
    try:
        from jupyter_client.kernelspec import KernelSpecManager
    except ImportError as error:
        raise SetupError(
            "Jupyter is not installed here.", hint="Install it with: pip install 'torpor[jupyter]'"
        ) from error
    return KernelSpecManager()


def _record_of(spec: Spec | None) -> dict[str, Any] | None:
    record = ((spec or {}).get("metadata") or {}).get("torpor")
    return record if isinstance(record, dict) and "argv" in record else None


def _read(path: Path) -> Spec | None:
    try:
        spec = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return spec if isinstance(spec, dict) else None


def _is_writable(folder: Path) -> bool:
    return (folder / SPEC).exists() and os.access(folder, os.W_OK) and os.access(folder / SPEC, os.W_OK)


def _copy(source: Path, target: Path, spec: Spec) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.py"))
        _write(target / SPEC, _rendered(spec))
    except PermissionError as error:
        raise NotPermitted(f"{target} may not be written by this user.", safe="Nothing was changed.") from error


def _rendered(spec: Spec) -> bytes:
    return (json.dumps(spec, indent=1, ensure_ascii=False) + "\n").encode()


def _write(path: Path, content: bytes) -> None:
    draft = path.with_name(path.name + ".new")
    draft.write_bytes(content)
    if path.exists():
        shutil.copymode(path, draft)
    draft.rename(path)
