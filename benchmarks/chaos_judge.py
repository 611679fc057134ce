"""Whether a run to which faults happened lost anything by them."""

import re
import shutil
from pathlib import Path
from typing import Any

from chaos_legs import BATCH, MAX_STALENESS
from cli_runs import TIME_KEYS
from fault_ledger import Ledger

from slimrl.observability.metrics import read_metrics
from slimrl.observability.run_folder import RunFolder

SHARED_MEMORY_DIR = Path("/dev/shm")
CACHE = "torchinductor_"
"""Begin of the name of a folder in which torch keeps what it has compiled, for all that come"""
OF_WANDB, TABLE = re.compile(r".*(wandb-media|wandb-artifacts)|wandb-\d+-.*"), ".table.json"
"""Names of temporary folders that wandb leaves where its process is killed, and the end of those of files in others"""
OF_FAULTS = ("rollout/retries", "reward/retries", "resync/replaced_engines")
"""Metrics that count what a fault has cost a run that is otherwise the same."""


def steps_in_order(folder: RunFolder) -> list[str]:
    steps = [line["step"] for line in read_metrics(folder.metrics)]
    return [] if steps == list(range(len(steps))) else [f"steps {steps}"]


def ledger_of(folder: RunFolder) -> tuple[dict[str, int], list[str]]:
    """How the groups of an asynchronous run left that was preempted, and what is wrong with it."""
    ledger = Ledger.read(folder)
    return dict(ledger.ends), ledger.problems(batch=BATCH, max_staleness=MAX_STALENESS)


def differences(folder: RunFolder, whole: RunFolder) -> list[str]:
    """What metrics and exports of two runs of the same length differ in."""
    ours, theirs = comparable(folder), comparable(whole)
    if len(ours) != len(theirs):
        return [f"steps {len(ours)} and {len(theirs)}"]
    found = []
    for one, other in zip(ours, theirs, strict=True):
        if names := [name for name in one.keys() | other.keys() if one.get(name) != other.get(name)]:
            shown = {name: (one.get(name), other.get(name)) for name in sorted(names)[:4]}
            found.append(f"step {one['step']} differs in {len(names)} metrics: {shown}")
    if exported(folder) != exported(whole):
        found.append("the exports differ")
    return found[:3]


def comparable(folder: RunFolder) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in line.items() if not name.startswith((*TIME_KEYS, *OF_FAULTS))}
        for line in read_metrics(folder.metrics)
    ]


def exported(folder: RunFolder) -> dict[str, bytes]:
    files = {path.name: path.read_bytes() for path in folder.export.glob("*.safetensors")}
    if not files:
        raise ValueError(f"{folder.export} has no weights")
    return files


def remove_left_files(*folders: Path) -> list[str]:
    """What is left in these folders when all processes have ended; it is removed, and so not found after the next leg.

    Args:
        folders: of shared memory and of temporary files, all of them this benchmark's own.
    """
    paths = [path for folder in folders for path in sorted(folder.iterdir())]
    left = [str(path) for path in paths if not is_known(path)]
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    return left


def is_known(path: Path) -> bool:
    """Whether it is a cache, or what wandb leaves."""
    if path.name.startswith(CACHE) or OF_WANDB.fullmatch(path.name):
        return True
    content = list(path.iterdir()) if path.is_dir() and not path.is_symlink() else []
    return bool(content) and all(file.name.endswith(TABLE) for file in content)
