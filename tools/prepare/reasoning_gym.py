"""Writes prompt files of tasks of reasoning-gym, whose generators make any number of questions.

1. For each level a task's generator is asked for questions, each time with the next seeds, until there are enough that
   differ, or until TRIES times as many were drawn. Small tasks have few: two numbers of one digit have 200 sums.
2. A question belongs to the first level that has it.
3. The questions of a level are shuffled. The first of them are held out, the rest is trained on.
4. An entry has to mean the same after it was written as JSON: its own answer earns 1 before and after.
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from slimrl_tools.prepare.difficulty import Difficulty, configured, read_difficulty

from slimrl.base.atomic import atomic_file
from slimrl.base.extras import needs_extra
from slimrl.base.seeds import derive_seed
from slimrl.config.problems import suggestion
from slimrl.rewards.reasoning_gym import EXTRA, PACKAGE

NAME = "reasoning-gym"
TRIES = 10
"""Questions that are drawn for each one wanted, before there are no more different ones"""
REFUSED = {
    "composite": "mixes other tasks; name these",
    "game_of_life_halting": "the library's scorer takes every answer as right",
}


@dataclass(frozen=True, kw_only=True)
class TaskFiles:
    """What was written of a task at a level."""

    task: str
    level: int | None
    train: Path
    heldout: Path
    num_train: int
    num_heldout: int
    wanted: int

    @property
    def name(self) -> str:
        """For a recipe: the task, with the number in the files' names if there are several levels."""
        return self.task + self.train.stem.removeprefix("train")

    def __str__(self) -> str:
        text = f"{self.train}: {self.num_train} questions; {self.heldout}: {self.num_heldout}"
        found = self.num_train + self.num_heldout
        few = f"; only {found} of {self.wanted} wanted: {TRIES * self.wanted} draws gave no more different ones"
        return text + (few if found < self.wanted else "")


def prepare_tasks(names: str, out: Path, *, difficulty: str = "", num: int, heldout: int, seed: int) -> list[TaskFiles]:
    """Write `OUT/TASK/train.jsonl` and `heldout.jsonl` of each task, of several levels `train_LEVEL.jsonl` and so on.

    Args:
        names: tasks, with commas between them.
        difficulty: see read_difficulty.
        num: questions to train on, of each task and level; of the questions that there are, if these are fewer, the
            same fraction.
        heldout: questions to evaluate on.

    Raises:
        ValueError: the package is missing, there is no such task, level or setting, a folder exists, or a task cannot
            be written as JSON.
    """
    needs_extra(PACKAGE, EXTRA)
    from reasoning_gym.factory import CURRICULA, DATASETS

    tasks = [name.strip() for name in names.split(",")]
    for task in tasks:
        _check_task(task, sorted(DATASETS.keys() - REFUSED.keys()), tasks, out / task)
    wished = read_difficulty(difficulty, tasks)
    arguments: dict[str, list[dict[str, Any]]] = {}
    for task in tasks:
        curriculum = CURRICULA[task]() if task in CURRICULA else None
        arguments[task] = [
            configured(task, DATASETS[task][1], curriculum, level, wished.settings[task])
            for level in wished.levels or (None,)
        ]
    return [
        files
        for task in tasks
        for files in _write_task(task, out / task, arguments[task], wished, num=num, heldout=heldout, seed=seed)
    ]


def recipe_lines(written: Sequence[TaskFiles]) -> str:
    """The section `data` of a recipe that trains on all of these files in equal parts, and evaluates on each."""
    names = [files.name for files in written]
    first, *train = (str(files.train) for files in written)
    data: dict[str, Any] = {"train": first}
    if train:
        data |= {"more": dict(zip(names[1:], train, strict=True)), "weights": dict.fromkeys(["train", *names[1:]], 1)}
    data["eval"] = {name: str(files.heldout) for name, files in zip(names, written, strict=True)}
    return yaml.safe_dump({"data": data}, sort_keys=False, width=1000)


def _check_task(task: str, known: Sequence[str], tasks: Sequence[str], folder: Path) -> None:
    if task in REFUSED:
        raise ValueError(f"{task}: {REFUSED[task]}")
    if task not in known:
        raise ValueError(f"{task}: no such task; known are {', '.join(known)}.{suggestion(task, known)}")
    if tasks.count(task) > 1:
        raise ValueError(f"{task} is named twice")
    if folder.exists():
        raise ValueError(f"{folder} exists; it is not overwritten")


def _write_task(
    task: str,
    folder: Path,
    arguments: Sequence[dict[str, Any]],
    wished: Difficulty,
    *,
    num: int,
    heldout: int,
    seed: int,
) -> Iterator[TaskFiles]:
    seen = set[str]()
    several = len(wished.levels) > 1
    lines_of_level = []
    for number, given in enumerate(arguments):
        rng_seed = derive_seed(seed, task, number)
        lines = list(_distinct(task, given, num + heldout, rng_seed, seen))
        random.Random(rng_seed).shuffle(lines)
        lines_of_level.append(lines)
        if len(lines) < 2:
            raise ValueError(f"{task}: {len(lines)} different questions, and so none to hold out; use other settings")
    folder.mkdir(parents=True)
    for lines, level in zip(lines_of_level, wished.levels or (None,), strict=True):
        num_heldout = heldout if len(lines) == num + heldout else max(1, round(heldout * len(lines) / (num + heldout)))
        ending = f"_{level}.jsonl" if several else ".jsonl"
        paths = [folder / f"{name}{ending}" for name in ("train", "heldout")]
        for path, part in zip(paths, (lines[num_heldout:], lines[:num_heldout]), strict=True):
            with atomic_file(path) as stream:
                stream.writelines(json.dumps(line, ensure_ascii=False).encode() + b"\n" for line in part)
        yield TaskFiles(
            task=task, level=level, train=paths[0], heldout=paths[1], num_train=len(lines) - num_heldout,
            num_heldout=num_heldout, wanted=num + heldout,
        )  # fmt: skip


def _distinct(task: str, arguments: dict[str, Any], count: int, seed: int, seen: set[str]) -> Iterator[dict[str, Any]]:
    """Lines of at most `count` questions that are not in `seen`, to which they are added."""
    import reasoning_gym

    found = 0
    for chunk in range(TRIES):
        # Item i of a data set is made from its seed plus i.
        entries = reasoning_gym.create_dataset(task, seed=seed + chunk * count, size=count, **arguments)
        for place in range(count):
            entry = entries[place]
            if entry["question"] in seen:
                continue
            seen.add(entry["question"])
            yield _line(task, entry)
            found += 1
            if found == count:
                return


def _line(task: str, entry: dict[str, Any]) -> dict[str, Any]:
    """Raises ValueError if the entry does not survive JSON."""
    from slimrl.rewards.reasoning_gym_scorer import answer

    try:
        kept = json.loads(json.dumps(entry, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{task}: an entry cannot be written as JSON: {error}") from error
    if entry["answer"] is not None and answer([task, kept, entry["answer"]]) != 1:
        raise ValueError(f"{task}: the answer {entry['answer']!r} of an entry does not earn 1 when read from JSON")
    return {
        "prompt": entry["question"],
        "label": entry["answer"],
        "metadata": {"data_set": NAME, "task": task, "entry": kept},
    }
