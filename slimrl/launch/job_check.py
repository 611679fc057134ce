"""Checks of a SLURM job before its submission: the recipe, the number of nodes, the settings, the files.

`--dry-run` needs none of the cluster's files, and warns of what would stop a submission from this machine. A submission
checks them as the start of the run will, hours later; only checks that need a GPU are left to that start.
"""

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from slimrl.config.hub import hub_model
from slimrl.config.load import Command, LoadedRecipe
from slimrl.config.problems import Problem, RecipeError, Violation
from slimrl.config.restart_rules import SPARES, unused_spares
from slimrl.config.schema.recipe import Recipe
from slimrl.config.tracking_rules import has_wandb_key, tracking_warnings
from slimrl.config.yaml_source import is_pipe
from slimrl.launch.submit import MARGIN_S, SlurmJob, check_sbatch, process_counts
from slimrl.launch.time_limit import check_time_limit
from slimrl.models.offline_recipe import read_offline
from slimrl.observability.run_folder import RunFolder, check_start
from slimrl.observability.units import counted
from slimrl.runtime.cluster.placement import place_on_fewest


def check_job(path: Path, overrides: Sequence[str], job: SlurmJob, *, files: bool) -> tuple[Problem, ...]:
    """Warnings about a recipe and its job.

    Args:
        files: refuse missing files instead of warning about them. Rules that need an unknown, missing model are
            skipped.

    Raises:
        RecipeError: the recipe is refused.
        ValueError: too few or too many nodes, contradictory settings, or a run that cannot start.
    """
    if is_pipe(path):
        raise ValueError(f"{path}: a pipe, which the job could not read. Write the recipe to a file.")
    command: Command = "sft" if job.sft else "train"
    in_image = job.container is not None
    planned = read_offline(path, overrides, command, files=files, model_needed=False, in_image=in_image)
    loaded = planned.loaded
    _check_settings(path, job)
    _check_nodes(loaded, job)
    warnings: list[Violation] = []
    model = loaded.recipe.model.path
    if not Path(model).exists():
        warnings.append(("model.path", f"{model}: {planned.model}."))
    grace_s, waits_s = loaded.recipe.checkpoint.grace_s, job.signal_s - MARGIN_S
    if grace_s >= waits_s:
        message = (
            f"a rollout may take {grace_s:g} s, but the job waits only {waits_s} s for a checkpoint. Raise --signal-s."
        )
        warnings.append(("checkpoint.grace_s", message))
    if job.container:
        warnings += unmounted_paths(loaded.recipe, job.log_dir, job.container_mounts or "")
        # Without a key here either, `planned` has the warning.
        warnings += tracking_warnings(loaded.recipe, command, home=False) if has_wandb_key() else ()
    warnings += _check_files(loaded, job) if files else _missing_here(loaded, job)
    return (*planned.notes, *(loaded.problem(*warning, warning=True) for warning in warnings))


def _check_settings(path: Path, job: SlurmJob) -> None:
    if job.nodes < 1 or job.spares < 0:
        raise ValueError(f"--nodes {job.nodes} --spares {job.spares}: needs at least 1 node and 0 replacement nodes.")
    if job.container and job.venv:
        raise ValueError("--container and --venv exclude each other.")
    if job.container_mounts and not job.container:
        raise ValueError("--container-mounts needs --container.")
    if job.resume and job.overwrite:
        raise ValueError("--resume and --overwrite exclude each other.")
    if job.signal_s <= MARGIN_S:
        raise ValueError(f"--signal-s {job.signal_s}: must exceed the {MARGIN_S} s that are kept for the requeue.")
    if job.time is not None:
        check_time_limit(job.time, job.signal_s)
    check_sbatch(path, job)


def _check_nodes(loaded: LoadedRecipe, job: SlurmJob) -> None:
    if not job.gpus_per_node:
        return
    recipe, spare_nodes = loaded.recipe, loaded.recipe.trainer.spare_nodes
    placement, needed = place_on_fewest(recipe, job.gpus_per_node, **process_counts(recipe, sft=job.sft))
    # The driver is on the first node of a job.
    ranks = [slot.node.name for slot in (*placement.ranks, *placement.critics)]
    reason = unused_spares(spare_nodes or 1, ranks, driver=ranks[0])
    if spare_nodes and reason:
        raise RecipeError([loaded.problem(SPARES, reason)])
    if needed == job.nodes:
        return
    layouts = f"`slimrl plan {loaded.path} --suggest --gpus RANKS` lists layouts of another number of trainer ranks."
    nodes = f"{counted(needed, 'node')} of {job.gpus_per_node} GPUs"
    if needed > job.nodes:
        raise ValueError(f"{loaded.path}: needs {nodes}; --nodes {job.nodes} is too few. {layouts}")
    fills = f"{loaded.path}: the run fills {nodes}"
    given = [f"{name} ({number})" for name, number in (("--spares", job.spares), (SPARES, spare_nodes)) if number]
    on_top = f"{' and '.join(given)} {'comes' if len(given) == 1 else 'come'} on top: " if given else ""
    give, further = f"{on_top}give --nodes {needed}", job.nodes - needed
    if given and further <= job.spares + spare_nodes:
        raise ValueError(f"{fills}; {give}.")
    as_spares = ""
    if reason is None and recipe.run.max_restarts and (job.sft or not recipe.rollout.colocated):
        as_spares = f", or as spare nodes, for those that are lost later (--spare-nodes {spare_nodes + further})"
    raise ValueError(
        f"{fills}; {give}. To use {further} more, raise trainer.num_ranks or rollout.num_engines; or have them as "
        f"replacement nodes, for those that fail a check before the start (--spares {job.spares + further})"
        f"{as_spares}. {layouts}"
    )


def _check_files(loaded: LoadedRecipe, job: SlurmJob) -> list[Violation]:
    """Refuse a job that would not find its files; the warnings name checks that this machine cannot do."""
    root = Path.cwd()
    job_root = os.environ.get("SLIMRL_ROOT")
    if job_root is not None and Path(job_root).resolve() != root.resolve():
        raise ValueError(f"SLIMRL_ROOT is {job_root}, where the job would look for the recipe. Submit from there.")
    if not (root / "slimrl" / "launch" / "job.py").is_file():
        raise ValueError(f"{root} has no slimrl, and the job starts there. Submit from the root of the repository.")
    _check_python(job)
    # A slow import that --dry-run does not need.
    from slimrl.runtime.checks.fetched_model import with_cached_model
    from slimrl.runtime.checks.start_check import check_later_start, check_run

    loaded = with_cached_model(loaded)
    warnings = []
    try:
        check_later_start(loaded)
    except ImportError as error:
        if not job.container:
            raise ValueError(f"{loaded.path}: the code that it names cannot be imported: {error}") from error
        # This machine need not have the image's packages.
        warnings.append(("", f"the task is not checked, since it needs packages of the image: {error}."))
    if not _waits(job):
        check_run(loaded, resume=job.resume, overwrite=job.overwrite)
    return warnings


def _waits(job: SlurmJob) -> bool:
    """Whether it waits for another job, which may still change the run's folder."""
    return any(option.startswith("--dependency") for option in job.sbatch)


def _check_python(job: SlurmJob) -> None:
    if job.container:
        return
    python = (job.venv or Path(".venv")).absolute() / "bin" / "python"
    if not os.access(python, os.X_OK):
        raise ValueError(f"{python}: no such program, but the nodes need it. Give --venv or --container.")


def _missing_here(loaded: LoadedRecipe, job: SlurmJob) -> Iterator[Violation]:
    """Warnings of what would stop a submission from this machine."""
    run = RunFolder(Path(loaded.recipe.run.dir) / loaded.recipe.run.name)
    checks = [partial(_check_python, job)]
    if not _waits(job):
        checks.append(partial(check_start, run, resume=job.resume, overwrite=job.overwrite))
    for check in checks:
        try:
            check()
        except ValueError as error:
            yield "", f"a submission from here would be refused: {error}"
    if not job.log_dir.is_dir():
        yield (
            "",
            f"{job.log_dir}: no such folder, where the job would log. Make it before sbatch: mkdir -p {job.log_dir}",
        )


def unmounted_paths(recipe: Recipe, log_dir: Path, mounts: str) -> Iterator[Violation]:
    """Warnings for the recipe's paths that the container does not mount.

    Args:
        mounts: in pyxis' form, `SRC:DST,...` or `PATH` for both, each with optional `:FLAGS`.
    """
    inside = [part.split(":")[:2][-1] for part in mounts.split(",") if part]
    mounted = [Path.cwd(), log_dir.absolute(), *map(Path, inside)]
    paths = {
        "run.dir": recipe.run.dir,
        # A model of the Hub is fetched in the container.
        "model.path": "" if hub_model(recipe.model.path) else recipe.model.path,
        "model.megatron": recipe.model.megatron,
        "teacher.path": "" if hub_model(recipe.teacher.path) else recipe.teacher.path,
        "resync.dir": recipe.resync.dir,
        "resync.local_dir": recipe.resync.local_dir,
        **{recipe.data.train_key(name): path for name, path in recipe.data.train_files.items()},
        **{f"data.eval.{name}": path for name, path in recipe.data.eval.items()},
    }
    for key, text in paths.items():
        path = Path(text).absolute()
        if text and not any(folder in (path, *path.parents) for folder in mounted):
            yield key, f"{text}: not in the container. Mount its folder: --container-mounts SRC:DST,..."
