"""What each command of the CLI does, with its arguments as plain values."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TypeVar

from slimrl.config.load import LoadedRecipe
from slimrl.config.schema import Recipe
from slimrl.config.show import resolved_dict
from slimrl.data.prompts import Sampler
from slimrl.data.trajectory import read_trajectories, write_trajectories
from slimrl.observability.progress import Progress
from slimrl.observability.run_folder import RunFolder
from slimrl.observability.trackers import Trackers
from slimrl.runtime.batch import apply_truncation_rule
from slimrl.runtime.checkpoint_check import check_exported
from slimrl.runtime.learner import Learner
from slimrl.runtime.loop import train as train_loop
from slimrl.runtime.preemption import preemption_by_signal, raise_preempted
from slimrl.runtime.sft import read_examples, sft_loop
from slimrl.runtime.start import logs_of_command, open_run, prepare, rollout_stage, started
from slimrl.runtime.start_check import check_checkpoint_model, resume_point
from slimrl.runtime.state import RunState
from slimrl.runtime.step import Step
from slimrl.runtime.task import load_task
from slimrl.runtime.train_run import TrainRun

T = TypeVar("T")

BEFORE_STEP_0 = -1
"""Of an interrupted run without a checkpoint no line of metrics is kept."""


def train(
    path: Path,
    overrides: Sequence[str],
    *,
    resume: bool | None,
    overwrite: bool,
    job: str | None,
    checkpoint_log: Path | None,
    ray_address: str | None,
) -> None:
    """`slimrl train`: rollout and training until the recipe's number of steps.

    Args:
        resume: see `open_run`, also for `job` and `checkpoint_log`.
        ray_address: see `started`, here and in the other commands.

    Raises:
        Preempted: the run made room before its last step.
    """
    with Progress(0) as progress, ExitStack() as held:
        read = partial(load_task, train=True, evaluate=True)
        loaded, task = prepare(path, overrides, "train", progress, read, ray_address=ray_address)
        recipe = loaded.recipe
        progress.total_steps = recipe.steps
        run = open_run(loaded, progress, resume=resume, overwrite=overwrite, job=job, checkpoint_log=checkpoint_log)
        folder = held.enter_context(run)
        checkpoint, state = _resume_point(folder, recipe, progress)
        prompts = _sampler(task.train, recipe, state)
        updates = recipe.steps * recipe.trainer.updates_per_rollout
        with (
            preemption_by_signal(recipe.checkpoint.grace_s) as preemption,
            _trackers(loaded, folder, checkpoint, state) as trackers,
            started(
                recipe,
                folder,
                progress,
                with_engines=True,
                total_updates=updates,
                checkpoint=checkpoint,
                ray_address=ray_address,
            ) as processes,
        ):
            assert processes.engines is not None
            assert processes.trainers is not None
            with rollout_stage(recipe, task, processes.engines, progress) as stage:
                train_loop(
                    TrainRun(
                        recipe=recipe,
                        folder=folder,
                        task=task,
                        trainers=processes.trainers,
                        engines=processes.engines,
                        stage=stage,
                        trackers=trackers,
                        progress=progress,
                        state=state,
                        prompts=prompts,
                        preemption=preemption,
                    )
                )
        raise_preempted(folder, state.step, recipe.steps)


def train_on_file(
    path: Path, overrides: Sequence[str], *, trajectories: Path, steps: int, overwrite: bool, ray_address: str | None
) -> None:
    """`slimrl train --trajectories`: every step trains on the same trajectories; no engine runs.

    Raises:
        ValueError: the file is missing, holds no trajectories, or has broken lines.
    """
    with Progress(steps) as progress, ExitStack() as held:
        read = partial(load_task, train=False, evaluate=False)
        loaded, task = prepare(path, [*overrides, f"steps={steps}"], "train --trajectories", progress, read)
        recipe = loaded.recipe
        batch = read_trajectories(trajectories)
        apply_truncation_rule(batch, recipe.algorithm.truncated)
        folder = held.enter_context(open_run(loaded, progress, overwrite=overwrite))
        updates = steps * recipe.trainer.updates_per_rollout
        with (
            _trackers(loaded, folder, None, RunState()) as trackers,
            started(
                recipe, folder, progress, with_engines=False, total_updates=updates, ray_address=ray_address
            ) as processes,
        ):
            assert processes.trainers is not None
            state = RunState()
            learner = Learner(recipe, processes.trainers, state, task.group_filters)
            for number in range(1, steps + 1):
                step = Step(number)
                prepared = learner.prepare(step, batch)
                with step.timed("logprobs"):
                    learner.compute_old_logprobs(step, prepared, enforce_limit=number == 1)
                with step.timed("train"):
                    learner.train(step, prepared)
                step.close()
                trackers.log(number, step.metrics)
                progress.summary(number, step.metrics)
            processes.trainers.export_hf(folder.export)
            progress.say(f"model: {folder.export}")


def sft(
    path: Path,
    overrides: Sequence[str],
    *,
    resume: bool | None,
    overwrite: bool,
    job: str | None,
    checkpoint_log: Path | None,
    ray_address: str | None,
) -> None:
    """`slimrl sft`: supervised training on conversations; raises as `train`."""
    with Progress(0) as progress, ExitStack() as held:
        loaded, examples = prepare(path, overrides, "sft", progress, read_examples)
        recipe = loaded.recipe
        progress.total_steps = recipe.steps
        run = open_run(loaded, progress, resume=resume, overwrite=overwrite, job=job, checkpoint_log=checkpoint_log)
        folder = held.enter_context(run)
        checkpoint, state = _resume_point(folder, recipe, progress)
        sampler = _sampler(examples, recipe, state)
        with (
            preemption_by_signal(recipe.checkpoint.grace_s) as preemption,
            _trackers(loaded, folder, checkpoint, state) as trackers,
            started(
                recipe,
                folder,
                progress,
                with_engines=False,
                total_updates=recipe.steps,
                checkpoint=checkpoint,
                ray_address=ray_address,
            ) as processes,
        ):
            assert processes.trainers is not None
            sft_loop(recipe, sampler, processes.trainers, folder, trackers, progress, state, preemption)
        raise_preempted(folder, state.step, recipe.steps)


def evaluate(
    path: Path, overrides: Sequence[str], *, checkpoint: Path, json_file: Path | None, ray_address: str | None
) -> None:
    """`slimrl eval`: accuracy of a Hugging Face checkpoint on the recipe's evaluation sets."""
    _refuse_other_folder(recipe=path, checkpoint=checkpoint)
    with Progress(1) as progress:
        read = partial(load_task, train=False, evaluate=True)
        loaded, task = prepare(path, [*overrides, f"model.path={checkpoint}"], "eval", progress, read)
        recipe = loaded.recipe
        with (
            logs_of_command(recipe.run.dir, "eval", loaded) as folder,
            started(
                recipe, folder, progress, with_engines=True, total_updates=None, ray_address=ray_address
            ) as processes,
        ):
            assert processes.engines is not None
            with rollout_stage(recipe, task, processes.engines, progress) as stage:
                results = [stage.evaluate(name, prompts, label="eval")[0] for name, prompts in task.eval_sets.items()]
    for result in results:
        progress.say(
            f"{result.name}: accuracy {result.accuracy:.3f} on {result.num_prompts} prompts, "
            f"{result.turns_mean:.2f} turns and {result.tool_calls_mean:.2f} tool calls on average"
        )
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        report = {"checkpoint": str(checkpoint), "sets": {result.name: asdict(result) for result in results}}
        json_file.write_text(json.dumps(report, indent=2) + "\n")


def rollout(path: Path, overrides: Sequence[str], *, out: Path, ray_address: str | None) -> None:
    """`slimrl rollout`: one step's trajectories into a file; no trainer runs."""
    if out.exists():
        raise ValueError(f"{out} exists; remove it or give another --out.")
    with Progress(1) as progress:
        loaded, task = prepare(path, overrides, "rollout", progress, partial(load_task, train=True, evaluate=False))
        recipe = loaded.recipe
        prompts = _sampler(task.train, recipe, RunState()).take(recipe.rollout.prompts_per_step)
        with (
            logs_of_command(recipe.run.dir, "rollout", loaded) as folder,
            started(
                recipe, folder, progress, with_engines=True, total_updates=None, ray_address=ray_address
            ) as processes,
        ):
            assert processes.engines is not None
            with rollout_stage(recipe, task, processes.engines, progress) as stage:
                batch = stage.rollout(prompts, label="step_000001")
        out.parent.mkdir(parents=True, exist_ok=True)
        write_trajectories(out, batch.trajectories)
        progress.say(f"{len(batch.trajectories)} trajectories: {out}")


def export(path: Path, overrides: Sequence[str], *, checkpoint: Path, out: Path, ray_address: str | None) -> None:
    """`slimrl export`: a training checkpoint as a Hugging Face checkpoint, under the recipe's layout."""
    if out.exists():
        raise ValueError(f"{out} exists; an export never overwrites.")
    if not (checkpoint / "trainer").is_dir():
        raise ValueError(f"--checkpoint {checkpoint}: no checkpoint of a run; it would hold a folder `trainer`.")
    with Progress(1) as progress:
        loaded, _ = prepare(path, overrides, "export", progress, lambda _: None)
        recipe = loaded.recipe
        with progress.stage("checking the checkpoint"):
            check_exported(checkpoint)
        check_checkpoint_model(checkpoint, recipe)
        updates = recipe.steps * recipe.trainer.updates_per_rollout
        with (
            logs_of_command(recipe.run.dir, "export", loaded) as folder,
            started(
                recipe,
                folder,
                progress,
                with_engines=False,
                total_updates=updates,
                checkpoint=checkpoint,
                ray_address=ray_address,
            ) as processes,
        ):
            assert processes.trainers is not None
            processes.trainers.export_hf(out)
        progress.say(f"model: {out}")


def _resume_point(folder: RunFolder, recipe: Recipe, progress: Progress) -> tuple[Path | None, RunState]:
    """The newest checkpoint; the start for a new run, and for one that was ended before its first checkpoint.

    Raises:
        ValueError: see `resume_point`.
    """
    found = None
    if folder.has_checkpoint:
        with progress.stage("checking the checkpoint"):
            found = resume_point(folder, recipe, contents=True)
    folder.note_checkpoint(None if found is None else found.state.step)
    if found is None:
        return None, RunState()
    if not found.has_checksums:
        progress.say(f"{found.path} was written without checksums: its files are taken as they are")
    progress.say(f"continuing after step {found.state.step} of {recipe.steps}, from {found.path}")
    return found.path, found.state


def _sampler(items: Sequence[T], recipe: Recipe, state: RunState) -> Sampler[T]:
    """Goes through the training data in the order that the seed gives, from where `state` left it.

    Raises:
        ValueError: `state` is of a file with another number of lines.
    """
    sampler = Sampler(items, seed=recipe.seed, shuffle=recipe.data.shuffle)
    if state.cursor:
        try:
            sampler.restore(state.cursor)
        except ValueError as error:
            raise ValueError(f"data.train = {recipe.data.train}: {error}") from error
    return sampler


def _trackers(loaded: LoadedRecipe, folder: RunFolder, checkpoint: Path | None, state: RunState) -> Trackers:
    """Trackers that go on after the checkpoint's step, or from nothing."""
    keep = BEFORE_STEP_0 if checkpoint is None else state.step
    return Trackers(folder, loaded.recipe.tracking, resolved_dict(loaded), keep_through_step=keep)


def _refuse_other_folder(recipe: Path, checkpoint: Path) -> None:
    """Raises ValueError where `--checkpoint` of `slimrl eval` is not in the Hugging Face format."""
    if (checkpoint / "trainer").is_dir():
        raise ValueError(
            f"--checkpoint {checkpoint}: a training checkpoint of a run. Turn it into the Hugging Face format with "
            f"`slimrl export {recipe} --checkpoint {checkpoint} --out DIR` and evaluate that."
        )
    if not checkpoint.is_dir():
        raise ValueError(f"--checkpoint {checkpoint}: no such folder.")
    if not (checkpoint / "config.json").is_file():
        raise ValueError(f"--checkpoint {checkpoint}: holds no config.json; give a Hugging Face checkpoint folder.")
