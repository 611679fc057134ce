"""`slimrl eval`: a checkpoint on the recipe's evaluation sets."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path

from slimrl.agent.roles.player import plays_past
from slimrl.base.atomic import write_whole
from slimrl.base.folder_lock import folder_lock
from slimrl.base.output_file import check_output_file
from slimrl.checkpoints.digests import file_digests
from slimrl.config.load import LoadedRecipe
from slimrl.config.schema.agent import PAST
from slimrl.config.show import resolved_dict
from slimrl.data.engine import EVALUATION
from slimrl.evaluation.folder import EvalFolder
from slimrl.evaluation.item import item_keys
from slimrl.evaluation.items import Items
from slimrl.evaluation.record import checkpoint_files, describe, open_record
from slimrl.evaluation.result import SetResult, set_result
from slimrl.evaluation.tables import print_results
from slimrl.models.architecture import refuse_another_model
from slimrl.observability.progress import Progress
from slimrl.rollout.task.task import Task, load_task
from slimrl.runtime.start import logs_of_command, prepare, rollout_stage, started


def evaluate(
    path: Path,
    overrides: Sequence[str],
    *,
    checkpoint: Path,
    past: Path | None,
    json_file: Path | None,
    out: Path | None,
    ray_address: str | None,
) -> None:
    """Measure a Hugging Face checkpoint on the recipe's evaluation sets, and print the results.

    Args:
        past: a checkpoint that plays the roles of older versions; None for none.
        out: folder of the items and the results, in which an interrupted evaluation goes on.

    Raises:
        ValueError: the recipe or a checkpoint is refused, `out` has another evaluation, or a role is an older version's
            and there is none.
    """
    _refuse_other_folder("--checkpoint", recipe=path, checkpoint=checkpoint)
    settings_of_past = []
    if past is not None:
        _refuse_other_folder("--past", recipe=path, checkpoint=past)
        refuse_another_model("--past", past, checkpoint)
        settings_of_past.append("agent.past_versions.every_steps=1")
    with Progress(1) as progress:
        read = partial(load_task, train=False, evaluate=True)
        loaded, task = prepare(
            path,
            [*overrides, f"model.path={checkpoint}", *settings_of_past],
            "eval",
            progress,
            read,
            ray_address=ray_address,
        )
        if past is None and plays_past(chain(*task.eval_sets.values()), loaded.recipe.agent):
            raise ValueError(f"a role has the player {PAST}, an older version. Name its checkpoint with --past DIR.")
        if json_file is not None:
            check_output_file("--json-file", json_file)
        for note in task.notes:
            progress.say(note)
        settings = loaded.recipe.eval
        keys = {name: item_keys(name, prompts, settings.samples_per_prompt) for name, prompts in task.eval_sets.items()}
        with _items(out, loaded, task, checkpoint, past, progress) as items:
            planned = [*chain(*keys.values())]
            missing = items.missing(planned)
            if num_done := len(planned) - len(missing):
                progress.say(f"{num_done} of {len(planned)} trajectories are there already")
            if missing:
                _sample(loaded, task, items, past, progress, ray_address)
            items.write_in_order(planned)
            results = [set_result(items.of(keys[name]), settings, loaded.recipe.seed) for name in task.eval_sets]
            _write(results, checkpoint, [json_file, None if out is None else EvalFolder(out).summary])
    print_results(results)
    if out is not None:
        progress.say(f"items: {EvalFolder(out).items}")


def _sample(
    loaded: LoadedRecipe, task: Task, items: Items, past: Path | None, progress: Progress, ray_address: str | None
) -> None:
    """Start engines and finish the items that are missing."""
    recipe = loaded.recipe
    folder = logs_of_command(recipe.run.dir, "eval", loaded)
    with (
        started(
            recipe, folder, progress, with_engines=True, with_past=past is not None, ray_address=ray_address
        ) as processes,
        rollout_stage(loaded, task, processes, progress) as stage,
    ):
        if past is not None and processes.past is not None:
            processes.past.load_checkpoint(past, 0)
        for name, prompts in task.eval_sets.items():
            stage.evaluate(name, prompts, label=EVALUATION, items=items)


@contextmanager
def _items(
    out: Path | None, loaded: LoadedRecipe, task: Task, checkpoint: Path, past: Path | None, progress: Progress
) -> Iterator[Items]:
    """The finished items of `out`, which is locked; without it none, kept in memory.

    Raises:
        ValueError: `out` has another evaluation, or another process writes it.
    """
    if out is None:
        yield Items()
        return
    other = out.is_dir() and not EvalFolder(out).record.is_file() and any(out.iterdir())
    if other or (out.exists() and not out.is_dir()):
        raise ValueError(f"--out {out}: not the folder of an evaluation. Give one that is new or empty.")
    with progress.stage("reading the checkpoint"):
        checksums = _checksums(checkpoint, progress)
        if past is not None:
            checksums |= {f"past/{name}": checksum for name, checksum in _checksums(past, progress).items()}
    record = describe(resolved_dict(loaded), checkpoint, checksums, task.eval_sets)
    out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        held.enter_context(folder_lock(out, say=progress.say))
        open_record(EvalFolder(out).record, record)
        items = held.enter_context(Items(EvalFolder(out).items))
        EvalFolder(out).summary.unlink(missing_ok=True)
        yield items


def _checksums(checkpoint: Path, progress: Progress) -> dict[str, str]:
    with progress.phase("checksums", 0, "files") as phase:
        digests = file_digests(checkpoint, checkpoint_files(checkpoint), phase.update)
    return {name: digest.xxh3_128 for name, digest in digests.items()}


def _write(results: Sequence[SetResult], checkpoint: Path, files: Sequence[Path | None]) -> None:
    report = {"checkpoint": str(checkpoint), "sets": {result.name: result.to_json() for result in results}}
    for file in filter(None, files):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(report, indent=2) + "\n")


def _refuse_other_folder(option: str, recipe: Path, checkpoint: Path) -> None:
    """Raises ValueError if the folder of an option of `slimrl eval` is not in the Hugging Face format."""
    if (checkpoint / "trainer").is_dir():
        raise ValueError(
            f"{option} {checkpoint}: a training checkpoint of a run. Turn it into the Hugging Face format with "
            f"`slimrl export {recipe} --checkpoint {checkpoint} --out DIR` and evaluate that."
        )
    if not checkpoint.is_dir():
        raise ValueError(f"{option} {checkpoint}: no such folder.")
    if not (checkpoint / "config.json").is_file():
        raise ValueError(f"{option} {checkpoint}: holds no config.json; give a Hugging Face checkpoint folder.")
