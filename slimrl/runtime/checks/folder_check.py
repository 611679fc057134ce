"""Checks before the start that a run's folders can be written, here and on the nodes that write into them."""

import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slimrl.base.errors import StageError
from slimrl.config.env_vars import thread_variables
from slimrl.config.load import LoadedRecipe
from slimrl.config.problems import Problem
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.resync import TransportName
from slimrl.runtime.cluster.placement import Node, Slot
from slimrl.runtime.cluster.reservation import Reservation

NODES_TIMEOUT_S = 60.0
"""Deadline for all nodes to try a folder in parallel; most of the time goes into starting a process."""


def folder_problems(loaded: LoadedRecipe, *, shared_only: bool = False) -> list[Problem]:
    """Folders that cannot be created or written on this machine; leaves nothing in them.

    Args:
        shared_only: skip folders on each node's own disk, for a run on other machines.
    """
    recipe = loaded.recipe
    folders = {"run.dir": recipe.run.dir}
    if loaded.command in ("train", "resync bench"):
        transport = recipe.resync.transport
        if transport in (TransportName.disk, TransportName.delta):
            folders["resync.dir"] = recipe.resync.dir
        if transport is TransportName.delta and not shared_only:
            folders["resync.local_dir"] = recipe.resync.local_dir
    return [
        loaded.problem(key, f"{folder} cannot be written: {reason}.")
        for key, folder in folders.items()
        if folder and (reason := why_not_writable(Path(folder)))
    ]


def check_nodes(recipe: Recipe, places: Reservation, spares: Sequence[Node]) -> None:
    """Try `resync.local_dir` where `delta` writes into it: on nodes with engines, and that of trainer rank 0.

    Args:
        spares: nodes to which rank 0 may move.

    Raises:
        StageError: some nodes cannot write there, which the message names, or do not answer.
    """
    ranks, engines = places.placement.ranks, places.placement.engines
    if recipe.resync.transport is not TransportName.delta or not ranks or not engines:
        return
    slots: dict[Node, Slot] = {slot.node: slot for slot in (ranks[0], *(slot for slots in engines for slot in slots))}
    folder = Path(recipe.resync.local_dir).absolute()
    variables = thread_variables(1)
    asked: dict[Node, Any] = {
        node: _why_not_writable.options(**places.options(slot, variables)).remote(folder)
        for node, slot in slots.items()
    }
    for node in spares:
        there = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        how = {"num_cpus": 0, "scheduling_strategy": there, "runtime_env": {"env_vars": variables}}
        asked[node] = _why_not_writable.options(**how).remote(folder)
    try:
        reasons = dict(zip(asked, ray.get(list(asked.values()), timeout=NODES_TIMEOUT_S), strict=True))
    except ray.exceptions.RayError as error:
        raise StageError(f"resync.local_dir: nodes did not try {folder}: {type(error).__name__}", str(error)) from error
    if bad := [f"on {node.name}: {reason}" for node, reason in reasons.items() if reason]:
        raise StageError(f"resync.local_dir: {folder} cannot be written {', '.join(bad)}")


def why_not_writable(folder: Path, *, keep: bool = False) -> str:
    """The system's error, or "" if the folder and a file in it can be created. Removes both again.

    Args:
        keep: keep created folders, which other processes that try the same path may be using.
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
            # Another process may already have put a file there.
            with suppress(OSError):
                path.rmdir()


@ray.remote(max_retries=0)
def _why_not_writable(folder: Path) -> str:
    return why_not_writable(folder, keep=True)
