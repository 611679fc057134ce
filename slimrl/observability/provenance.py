"""provenance.json: what is needed to reproduce a run."""

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from slimrl.base.atomic import write_whole

PACKAGES = (
    "slimrl",
    "torch",
    "megatron-core",
    "transformer-engine",
    "sglang",
    "ray",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "omegaconf",
    "wandb",
)
"""Packages that a result may depend on; a missing one is recorded as null."""

GIT_TIMEOUT_S = 20.0


def _git(*arguments: str) -> str | None:
    """Output of a git command in slimrl's source folder; None without git or a checkout."""
    folder = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def collect_provenance(config: dict[str, Any], origins: dict[str, str], argv: Sequence[str]) -> dict[str, Any]:
    """Versions, commit, command line, host and the resolved recipe.

    Args:
        origins: dotted key -> where its value was set.
        argv: the command line.
    """
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": list(argv),
        "git": {"commit": _git("rev-parse", "HEAD"), "dirty": None if changes is None else bool(changes)},
        "packages": {package: _version(package) for package in PACKAGES},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": {"name": platform.node(), "cpus": len(os.sched_getaffinity(0))},
        "config": config,
        "config_origins": origins,
    }


def append_provenance(path: Path, provenance: dict[str, Any]) -> None:
    """Add an entry to provenance.json, a list with one entry per start of the run."""
    starts = json.loads(path.read_text()) if path.exists() else []
    write_whole(path, json.dumps([*starts, provenance], indent=2) + "\n")
