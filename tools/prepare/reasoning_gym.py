"""Writes prompt files of tasks of reasoning-gym, whose generators make any number of questions.

1. For each level a task's generator is asked for questions, each time with the next seeds, until there are enough that
   differ, or until TRIES times as many were drawn. Small tasks have few: two numbers of one digit have 200 sums.
2. A question belongs to the first level that has it.
3. The questions of a level are shuffled. The first of them are held out, the rest is trained on.
4. An entry has to mean the same after it was written as JSON: its own answer earns 1 then. Others are left out and
   counted.
5. Nothing is written before the questions of all tasks are there.
"""

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from slimrl_tools.prepare.difficulty import configured, read_difficulty
from slimrl_tools.progress import Advance, count_progress

from slimrl.base.atomic import atomic_folder
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
    left_out: int
    """Entries that JSON does not keep"""

    @property
    def name(self) -> str:
        """For a recipe: the task, with the number in the files' names if there are several levels."""
        return self.task + self.train.stem.removeprefix("train")

    def __str__(self) -> str:
        text = f"{self.train}: {self.num_train} questions; {self.heldout}: {self.num_heldout}"
        found = self.num_train + self.num_heldout
        few = f"; only {found} of {self.wanted} wanted: {TRIES * self.wanted} draws gave no more different ones"
        text += few if found < self.wanted else ""
        return text + (f"; left out: {self.left_out} that JSON does not keep" if self.left_out else "")


@dataclass(kw_only=True)
class _Questions:
    """Lines of a task at a level."""

    level: int | None
    lines: list[dict[str, Any]] = field(default_factory=list)
    left_out: int = 0
    reason: str = ""
    """Why the last of these was left out"""


def prepare_tasks(names: str, out: Path, *, difficulty: str = "", num: int, heldout: int, seed: int) -> list[TaskFiles]:
    """Write `OUT/TASK/train.jsonl` and `heldout.jsonl` of each task, of several levels `train_LEVEL.jsonl` and so on.

    Args:
        names: tasks, with commas between them.
        difficulty: see read_difficulty.
        num: questions to train on, of each task and level; of the questions that there are, if these are fewer, the
            same fraction.
        heldout: questions to evaluate on.

    Raises:
        ValueError: the package is missing, there is no such task, level or setting, a folder exists, or of a task there
            are too few entries that JSON keeps. Then nothing was written.
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
    most = sum(map(len, arguments.values())) * (num + heldout)
    with count_progress("drawing", most, "questions") as advance:
        questions = {
            task: _questions(task, arguments[task], wished.levels, num + heldout, seed, advance) for task in tasks
        }
    with ExitStack() as stack:
        return [
            files
            for task in tasks
            for partial in [stack.enter_context(atomic_folder(out / task))]
            for files in _write_task(task, out / task, partial, questions[task], num=num, heldout=heldout)
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


def _questions(
    task: str, arguments: Sequence[dict[str, Any]], levels: Sequence[int], wanted: int, seed: int, advance: Advance
) -> list[_Questions]:
    """Shuffled questions of each level, or of the task without levels."""
    seen = set[str]()
    found = []
    for number, (given, level) in enumerate(zip(arguments, levels or (None,), strict=True)):
        rng_seed = derive_seed(seed, task, number)
        questions = _Questions(level=level)
        _draw(task, given, wanted, rng_seed, seen, questions, advance)
        advance(wanted - len(questions.lines))
        random.Random(rng_seed).shuffle(questions.lines)
        if len(questions.lines) < 2:
            why = f" ({questions.left_out} left out, such as this one: {questions.reason})" if questions.reason else ""
            raise ValueError(
                f"{task}: {len(questions.lines)} different questions, and so none to hold out{why}; use other settings"
            )
        found.append(questions)
    return found


def _write_task(
    task: str, folder: Path, partial: Path, levels: Sequence[_Questions], *, num: int, heldout: int
) -> Iterator[TaskFiles]:
    """Write into `partial`, which becomes `folder`."""
    for questions in levels:
        lines = questions.lines
        num_heldout = heldout if len(lines) == num + heldout else max(1, round(heldout * len(lines) / (num + heldout)))
        ending = f"_{questions.level}.jsonl" if len(levels) > 1 else ".jsonl"
        names = [f"{name}{ending}" for name in ("train", "heldout")]
        for name, part in zip(names, (lines[num_heldout:], lines[:num_heldout]), strict=True):
            with (partial / name).open("wb") as stream:
                stream.writelines(json.dumps(line, ensure_ascii=False).encode() + b"\n" for line in part)
        yield TaskFiles(
            task=task, level=questions.level, train=folder / names[0], heldout=folder / names[1],
            num_train=len(lines) - num_heldout, num_heldout=num_heldout, wanted=num + heldout,
            left_out=questions.left_out,
        )  # fmt: skip


def _draw(
    task: str, arguments: dict[str, Any], count: int, seed: int, seen: set[str], into: _Questions, advance: Advance
) -> None:
    """Draw until there are `count` questions that are not in `seen`, to which they are added, or no more are found."""
    import reasoning_gym

    for chunk in range(TRIES):
        # Item i of a data set is made from its seed plus i.
        entries = reasoning_gym.create_dataset(task, seed=seed + chunk * count, size=count, **arguments)
        for place in range(count):
            entry = entries[place]
            if entry["question"] in seen:
                continue
            seen.add(entry["question"])
            try:
                into.lines.append(_line(task, entry))
                advance(1)
            except ValueError as error:
                into.left_out += 1
                into.reason = str(error)
            if len(into.lines) == count:
                return


def _line(task: str, entry: dict[str, Any]) -> dict[str, Any]:
    """Raises ValueError if the entry does not survive JSON."""
    from slimrl.rewards.reasoning_gym_scorer import answer

    try:
        kept = json.loads(json.dumps(entry, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"cannot be written as JSON: {error}") from error
    if entry["answer"] is not None and answer([task, kept, entry["answer"]]) != 1:
        raise ValueError(f"its answer {entry['answer']!r} does not earn 1 when read from JSON")
    return {
        "prompt": entry["question"],
        "label": entry["answer"],
        "metadata": {"data_set": NAME, "task": task, "entry": kept},
    }
