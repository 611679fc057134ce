"""`slimrl launch slurm`: the job script of a recipe, checked, written and submitted."""

import shlex
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slimrl.config.load import Command
from slimrl.config.problems import Problem
from slimrl.config.schema import Recipe
from slimrl.launch.reports import LaunchError
from slimrl.models.planned_recipe import read_planned
from slimrl.runtime.errors import StageError
from slimrl.runtime.placement import Node, place

SIGNAL_S = 300
"""How long before its time limit a job is asked for a checkpoint."""

MARGIN_S = 60
"""Of that, what is kept for the requeue itself."""


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """What is asked of SLURM beside the recipe."""

    nodes: int
    """That the run uses; spares come on top."""
    spares: int = 0
    gpus_per_node: int = 8
    partition: str | None = None
    account: str | None = None
    time: str | None = None
    """Limit in a form that SLURM takes, such as 1-12:00:00."""
    container: str | None = None
    venv: Path | None = None
    log_dir: Path = Path("runs/slurm")
    signal_s: int = SIGNAL_S
    sft: bool = False
    resume: bool = False
    overwrite: bool = False


def nodes_needed(recipe: Recipe, gpus_per_node: int, *, sft: bool) -> int:
    """The fewest nodes on which trainer ranks and engines have their places.

    Raises:
        ValueError: an engine does not fit on any node.
    """
    num_ranks, num_engines = recipe.trainer.num_ranks, 0 if sft else recipe.rollout.num_engines
    # More nodes than processes are of no use.
    for count in range(1, num_ranks + num_engines + 1):
        nodes = [Node(node_id=str(i), name=str(i), address=str(i), slots=gpus_per_node) for i in range(count)]
        try:
            place(recipe, nodes, num_ranks=num_ranks, num_engines=num_engines)
        except StageError:
            continue
        return count
    raise ValueError(
        f"no number of nodes with {gpus_per_node} GPUs is enough: rollout.engine_tensor = "
        f"{recipe.rollout.engine_tensor}, and each engine is on one node."
    )


def check_job(path: Path, overrides: Sequence[str], job: SlurmJob, *, files: bool) -> tuple[Problem, ...]:
    """Warnings of a recipe and of its job.

    Args:
        files: refuse what a start would not find on this machine, instead of warning of it; an unknown model that is
            not here is left out of the rules.

    Raises:
        RecipeError: the recipe is refused.
        ValueError: the nodes are too few for it, or the job's settings contradict each other.
    """
    command: Command = "sft" if job.sft else "train"
    planned = read_planned(path, overrides, command, files=files, model_needed=False)
    loaded = planned.loaded
    if job.nodes < 1 or job.spares < 0:
        raise ValueError(f"--nodes {job.nodes} --spares {job.spares}: at least one node, and no less than 0 spares.")
    if job.container and job.venv:
        raise ValueError("--container and --venv exclude each other.")
    if job.resume and job.overwrite:
        raise ValueError("--resume and --overwrite exclude each other.")
    if job.signal_s <= MARGIN_S:
        raise ValueError(f"--signal-s {job.signal_s}: more than the {MARGIN_S} s that the requeue may take.")
    if job.gpus_per_node:
        needed = nodes_needed(loaded.recipe, job.gpus_per_node, sft=job.sft)
        if needed > job.nodes:
            raise ValueError(
                f"{path}: needs {needed} nodes of {job.gpus_per_node} GPUs; --nodes {job.nodes} is too few."
            )
    model = loaded.recipe.model.path
    if Path(model).exists():
        return planned.notes
    return (*planned.notes, loaded.problem("model.path", f"{model}: {planned.model}.", warning=True))


def job_script(path: Path, overrides: Sequence[str], job: SlurmJob) -> str:
    """The batch script of a job that `check_job` has let pass."""
    directives = {
        "job-name": f"slimrl-{path.stem}",
        "nodes": job.nodes + job.spares,
        "ntasks-per-node": 1,
        "gpus-per-node": job.gpus_per_node or None,
        "partition": job.partition,
        "account": job.account,
        "time": job.time,
        "signal": f"B:USR1@{job.signal_s}",
        "mem": 0,
        "open-mode": "append",
        "output": job.log_dir / "%j.log",
    }
    options: dict[str, object] = {
        "--spares": job.spares,
        "--gpus-per-node": job.gpus_per_node,
        "--log-dir": job.log_dir,
        "--grace-s": job.signal_s - MARGIN_S,
        "--venv": job.venv,
        "--container": job.container,
    }
    arguments = [text for name, value in options.items() if value is not None for text in (name, str(value))]
    flags = {"--sft": job.sft, "--resume": job.resume, "--overwrite": job.overwrite}
    arguments += [name for name, given in flags.items() if given]
    arguments += [str(path), *overrides]
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH --{name}={value}" for name, value in directives.items() if value is not None),
            "#SBATCH --exclusive",
            "#SBATCH --requeue",
            "set -euo pipefail",
            'cd "${SLIMRL_ROOT:-$SLURM_SUBMIT_DIR}"',
            f'exec "${{SLIMRL_HOST_PYTHON:-python3}}" -m slimrl.launch.job {shlex.join(arguments)}',
            "",
        ]
    )


def submit(script: str, name: str, log_dir: Path) -> tuple[Path, str]:
    """Write a job's script into `log_dir`, under a name with the time, and submit it.

    Returns:
        The script's file, and what sbatch said.

    Raises:
        LaunchError: sbatch refused it.
    """
    # SLURM drops a job silently whose log it cannot open.
    log_dir.mkdir(parents=True, exist_ok=True)
    file = log_dir / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.sbatch"
    file.write_text(script)
    try:
        answer = subprocess.run(["sbatch", str(file)], capture_output=True, text=True, timeout=60, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"sbatch: {error}. The script is {file}.") from error
    if answer.returncode:
        raise LaunchError(f"sbatch: {answer.stderr.strip()} The script is {file}.")
    return file, answer.stdout.strip()
