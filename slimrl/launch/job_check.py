"""What is refused of a SLURM job before it is submitted: the recipe, its size, its settings, what is not here.

A script that is only written needs none of the cluster's files. A submission looks into them as the start of the run
will, which may come hours later; what needs a GPU is left to it.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from slimrl.config.load import Command, LoadedRecipe
from slimrl.config.problems import Problem, Violation
from slimrl.launch.mounts import unmounted_paths
from slimrl.launch.submit import MARGIN_S, SlurmJob, check_sbatch, nodes_needed
from slimrl.launch.time_limit import check_time_limit
from slimrl.models.planned_recipe import read_planned


def check_job(path: Path, overrides: Sequence[str], job: SlurmJob, *, files: bool) -> tuple[Problem, ...]:
    """Warnings of a recipe and of its job.

    Args:
        files: refuse what a start would not find on this machine, instead of warning of it; an unknown model that is
            not here is left out of the rules.

    Raises:
        RecipeError: the recipe is refused.
        ValueError: the nodes are too few or too many for it, the job's settings contradict each other, or its run
            cannot be begun.
    """
    command: Command = "sft" if job.sft else "train"
    planned = read_planned(path, overrides, command, files=files, model_needed=False)
    loaded = planned.loaded
    _check_settings(path, job)
    _check_nodes(loaded, job)
    warnings: list[Violation] = []
    model = loaded.recipe.model.path
    if not Path(model).exists():
        warnings.append(("model.path", f"{model}: {planned.model}."))
    grace_s, waits_s = loaded.recipe.checkpoint.grace_s, job.signal_s - MARGIN_S
    if grace_s >= waits_s:
        message = f"{grace_s:g} s for a rollout, and the job waits {waits_s} s for the checkpoint. Raise --signal-s."
        warnings.append(("checkpoint.grace_s", message))
    if job.container:
        warnings += unmounted_paths(loaded.recipe, job.log_dir, job.container_mounts or "")
    if files:
        warnings += _check_files(loaded, job)
    return (*planned.notes, *(loaded.problem(*warning, warning=True) for warning in warnings))


def _check_settings(path: Path, job: SlurmJob) -> None:
    if job.nodes < 1 or job.spares < 0:
        raise ValueError(f"--nodes {job.nodes} --spares {job.spares}: at least one node, and no less than 0 spares.")
    if job.container and job.venv:
        raise ValueError("--container and --venv exclude each other.")
    if job.container_mounts and not job.container:
        raise ValueError("--container-mounts needs --container.")
    if job.resume and job.overwrite:
        raise ValueError("--resume and --overwrite exclude each other.")
    if job.signal_s <= MARGIN_S:
        raise ValueError(f"--signal-s {job.signal_s}: more than the {MARGIN_S} s that the requeue may take.")
    if job.time is not None:
        check_time_limit(job.time, job.signal_s)
    check_sbatch(path, job)


def _check_nodes(loaded: LoadedRecipe, job: SlurmJob) -> None:
    if not job.gpus_per_node:
        return
    needed = nodes_needed(loaded.recipe, job.gpus_per_node, sft=job.sft)
    if needed == job.nodes:
        return
    wrong = "is too few" if needed > job.nodes else "leaves some without work; nodes in reserve are --spares"
    nodes = "1 node" if needed == 1 else f"{needed} nodes"
    raise ValueError(f"{loaded.path}: needs {nodes} of {job.gpus_per_node} GPUs; --nodes {job.nodes} {wrong}.")


def _check_files(loaded: LoadedRecipe, job: SlurmJob) -> list[Violation]:
    """Refuse what the job would not find; warn of what cannot be looked into here."""
    root = Path.cwd()
    elsewhere = os.environ.get("SLIMRL_ROOT")
    if elsewhere is not None and Path(elsewhere).resolve() != root.resolve():
        raise ValueError(f"SLIMRL_ROOT is {elsewhere}, where the job would look for the recipe. Submit from there.")
    if not (root / "slimrl" / "launch" / "job.py").is_file():
        raise ValueError(f"{root} has no slimrl, and the job starts there. Submit from the root of the repository.")
    if not job.container:
        python = (job.venv or Path(".venv")).absolute() / "bin" / "python"
        if not os.access(python, os.X_OK):
            raise ValueError(f"{python}: no such program, and the nodes run it. Give --venv or --container.")
    # Heavy, and of no use to who only writes the script.
    from slimrl.runtime.start_check import check_later_start, check_run

    warnings = []
    try:
        check_later_start(loaded)
    except ImportError as error:
        if not job.container:
            raise ValueError(f"{loaded.path}: what it names cannot be imported: {error}") from error
        # Of the image's packages this machine needs none.
        warnings.append(("", f"the task was not looked into, which needs packages of the image: {error}."))
    # A job that waits for another one finds what that leaves.
    if not any(option.startswith("--dependency") for option in job.sbatch):
        check_run(loaded.recipe, resume=job.resume, overwrite=job.overwrite)
    return warnings
