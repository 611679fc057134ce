"""The two sides of a race: slimrl's command, and TRL in an environment of its own. They never run at the same time.

1. `make_venv` makes TRL's environment (requirements/trl.txt) where there is none.
2. `run_trl` starts two processes of trl_steps.py, which time the steps of TRL's GRPOTrainer.
3. `run_slimrl` runs `slimrl train`, whose metrics have the times.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from ctypes.util import find_library
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from step import RECIPE

from slimrl.observability.metrics import read_metrics

ROOT = Path(__file__).parents[1]
REQUIREMENTS, LOCK = ROOT / "requirements" / "trl.txt", ROOT / "requirements" / "lock.txt"
INSTALL_TIMEOUT_S, RUN_TIMEOUT_S = 1800.0, 3600.0
NUM_RANKS = 2
"""Trainer ranks of either side, one thread each"""
ALLOCATOR = "tcmalloc_minimal"
Steps = list[dict[str, float]]


def make_venv(folder: Path) -> Path:
    """Its Python, with requirements/trl.txt; nothing is done if it has them.

    Raises:
        ValueError: the folder holds something else.
        CalledProcessError, TimeoutExpired: a package could not be installed.
    """
    python, stamp = folder / "bin" / "python", folder / "installed.txt"
    wanted = REQUIREMENTS.read_text()
    if folder.exists() and (not stamp.is_file() or stamp.read_text() != wanted):
        raise ValueError(f"{folder} is not an environment with the packages of {REQUIREMENTS}; remove it")
    if not folder.exists():
        uv = Path(sys.executable).parent / "uv"
        subprocess.run([uv, "venv", "-q", "--python", sys.executable, folder], check=True, timeout=60)
        packages: list[str | Path] = ["--requirement", REQUIREMENTS, "--constraint", LOCK]
        install: list[str | Path] = [uv, "pip", "install", "-q", "--python", python, *packages]
        subprocess.run(install, check=True, timeout=INSTALL_TIMEOUT_S)
        stamp.write_text(wanted)
    return python


def run_trl(python: Path, work: Mapping[str, Any]) -> Steps:
    """What trl_steps.py writes of each step but the first, and `training_s`, all but the generation.

    Args:
        work: what trl_steps.py reads.

    Raises:
        ValueError: the allocator is not installed.
        CalledProcessError, TimeoutExpired: a process failed; what it wrote is on the terminal.
    """
    allocator = find_library(ALLOCATOR)
    if allocator is None:
        raise ValueError(
            f"lib{ALLOCATOR}, with which TRL is faster, is not installed: apt install libtcmalloc-minimal4"
        )
    with TemporaryDirectory() as name:
        file, out = Path(name) / "work.json", Path(name) / "steps.json"
        file.write_text(json.dumps(work))
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "LD_PRELOAD": allocator,
            "HF_HUB_OFFLINE": "1",
        }
        command: list[str | Path] = [python, *launch, Path(__file__).with_name("trl_steps.py"), file, out]
        subprocess.run(command, check=True, timeout=RUN_TIMEOUT_S, env=environment)
        steps = json.loads(out.read_text())
    return [{**step, "training_s": step["total_s"] - step["generation_s"]} for step in steps]


def run_slimrl(folder: Path, settings: Sequence[str]) -> Steps:
    """Metrics of all steps of a run with these settings, whose folder is `folder`.

    Raises:
        CalledProcessError, TimeoutExpired: the run failed; what it wrote is on the terminal.
    """
    slimrl("train", str(RECIPE), *settings)
    return read_metrics(folder / "metrics.jsonl")


def slimrl(*arguments: str) -> None:
    """Run a command of slimrl that finds the functions of this folder.

    Raises:
        CalledProcessError, TimeoutExpired: it failed.
    """
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}"}
    command = [sys.executable, "-m", "slimrl.cli", *arguments]
    subprocess.run(command, check=True, timeout=RUN_TIMEOUT_S, env=environment)
