"""Folders that a run writes into, tried before anything starts: here, and on the nodes that write into them."""

import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

from slimrl.config.load import LoadedRecipe
from slimrl.config.problems import Problem, Violation
from slimrl.config.schema import Recipe, TransportName
from slimrl.runtime.errors import StageError
from slimrl.runtime.placement import Node, Slot
from slimrl.runtime.reservation import Reservation

NODES_TIMEOUT_S = 60.0
"""For all nodes to try a folder, side by side; most of it is the start of a process."""


def folder_problems(loaded: LoadedRecipe, *, shared_only: bool = False) -> list[Problem]:
    """Folders that cannot be made or written on this machine; nothing is left in them.

    Args:
        shared_only: leave out what lies on the own disk of each node, for a run whose nodes are not this machine.
    """
    return [loaded.problem(key, message) for key, message in _folder_violations(loaded, shared_only)]


def check_nodes(recipe: Recipe, places: Reservation) -> None:
    """Try `resync.local_dir` on every node with engines and on that of trainer rank 0, where `delta` writes into it.

    Raises:
        StageError: it cannot be made or written on some nodes, which it names, or they do not answer.
    """
    ranks, engines = places.placement.ranks, places.placement.engines
    if recipe.resync.transport is not TransportName.delta or not ranks or not engines:
        return
    slots: dict[Node, Slot] = {slot.node: slot for slot in (ranks[0], *(slots[0] for slots in engines))}
    folder = Path(recipe.resync.local_dir).absolute()
    asked: dict[Node, Any] = {
        node: _why_not_writable.options(**places.options(slot, 1)).remote(folder) for node, slot in slots.items()
    }
    try:
        reasons = dict(zip(asked, ray.get(list(asked.values()), timeout=NODES_TIMEOUT_S), strict=True))
    except ray.exceptions.RayError as error:
        raise StageError(f"resync.local_dir: nodes did not try {folder}: {type(error).__name__}", str(error)) from error
    if bad := [f"on {node.name}: {reason}" for node, reason in reasons.items() if reason]:
        raise StageError(f"resync.local_dir: {folder} cannot be written {', '.join(bad)}")


def _folder_violations(loaded: LoadedRecipe, shared_only: bool) -> Iterator[Violation]:
    recipe = loaded.recipe
    folders = {"run.dir": recipe.run.dir}
    if loaded.command in ("train", "resync bench"):
        transport = recipe.resync.transport
        if transport in (TransportName.disk, TransportName.delta):
            folders["resync.dir"] = recipe.resync.dir
        if transport is TransportName.delta and not shared_only:
            folders["resync.local_dir"] = recipe.resync.local_dir
    for key, folder in folders.items():
        if folder and (reason := why_not_writable(Path(folder))):
            yield key, f"{folder} cannot be written: {reason}."


def why_not_writable(folder: Path, *, keep: bool = False) -> str:
    """The reason of the system; empty where the folder can be made and a file in it. What this makes is removed.

    Args:
        keep: leave the folders that this makes, of which others that try the same folder may be making use.
    """
    folder = folder.absolute()
    made: list[Path] = []
    try:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        for path in reversed(missing):
            path.mkdir(exist_ok=True)
            made.append(path)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return error.strerror or str(error)
    finally:
        for path in () if keep else reversed(made):
            # Another process may have put something there by now.
            with suppress(OSError):
                path.rmdir()


@ray.remote(max_retries=0)
def _why_not_writable(folder: Path) -> str:
    return why_not_writable(folder, keep=True)
