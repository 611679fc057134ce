"""Prompt files of BFCL's own entries, or of easy generated tasks.

The categories have the same 200 tasks in four forms: a held-out task is held out in each of them.
"""

import inspect
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from slimrl.base.jsonl import write_lines
from slimrl.environments.bfcl.demonstrations import demonstration
from slimrl.environments.bfcl.entry import Entry
from slimrl.environments.bfcl.generated import generate
from slimrl.environments.bfcl.package import CLASSES, DATA, class_functions, json_lines
from slimrl.environments.bfcl.python_calls import with_keywords

CATEGORIES = ("base", "miss_func", "miss_param", "long_context")
"""BFCL's, with `multi_turn_` before each in its files"""


def write(
    out: Path,
    *,
    num: int,
    heldout: int,
    seed: int,
    tasks: Literal["base", "generated"] = "base",
    turns: int | None = None,
    classes: Sequence[str] | None = None,
    demonstrations: int = 0,
) -> None:
    """Write `train.jsonl` and `heldout.jsonl`.

    Args:
        out: folder, made if it is not there.
        num: tasks to train on.
        heldout: tasks that are held out.
        tasks: `base` for the entries of BFCL, of which `heldout_<category>.jsonl` are written too: the held-out ones
            with missing functions, missing parameters and long answers. `generated` for easy tasks of our own.
        turns: most user turns of a task; None for any number of `base`, and one of `generated`.
        classes: of the package; tasks that need another one are left out.
        demonstrations: conversations in `sft.jsonl`, of `generated` alone, none of which is a task of the other files.

    Raises:
        ValueError: there are not so many tasks, or an argument does not fit.
    """
    if tasks not in ("base", "generated"):
        raise ValueError(f"tasks is {tasks!r}. Use base or generated.")
    if demonstrations and tasks == "base":
        raise ValueError("demonstrations are made of generated tasks alone. Add tasks=generated, or leave them out.")
    if tasks == "generated":
        made = generate(num + heldout + demonstrations, seed=seed, turns=turns or 1, classes=classes)
        found = [task.entry for task in made[: num + heldout]]
        shown = made[num + heldout :]
    else:
        found, shown = _shuffled_base(num, heldout, seed, turns, classes), []
    out.mkdir(parents=True, exist_ok=True)
    held_out = found[:heldout]
    write_lines(out / "heldout.jsonl", map(_prompt_line, held_out))
    write_lines(out / "train.jsonl", map(_prompt_line, found[heldout : heldout + num]))
    if tasks == "base":
        for category in CATEGORIES[1:]:
            by_number = {_number(entry): entry for entry in entries(category)}
            others = [by_number[_number(entry)] for entry in held_out]
            write_lines(out / f"heldout_{category}.jsonl", map(_prompt_line, others))
    if shown:
        rng = random.Random(seed)
        write_lines(out / "sft.jsonl", (demonstration(task, rng) for task in shown))


def entries(category: str) -> list[Entry]:
    """All entries of a category with their ground truth."""
    name = f"BFCL_v4_multi_turn_{category}.json"
    truth = {line["id"]: line["ground_truth"] for line in json_lines(DATA / "possible_answer" / name)}
    return [_entry(line, truth[line["id"]]) for line in json_lines(DATA / name)]


def _entry(line: dict[str, Any], ground_truth: list[list[str]]) -> Entry:
    parameters = {name: order for each in line["involved_classes"] for name, order in _parameters(each).items()}
    return Entry(
        id=line["id"],
        involved_classes=line["involved_classes"],
        initial_config=line["initial_config"],
        questions=line["question"],
        ground_truth=[[with_keywords(call, parameters) for call in turn] for turn in ground_truth],
        missed_function=line.get("missed_function", {}),
    )


def _parameters(class_name: str) -> dict[str, list[str]]:
    """Names of the parameters of each function of a class, in order."""
    made = CLASSES[class_name]
    names = [each["name"] for each in class_functions(class_name)]
    return {name: list(inspect.signature(getattr(made, name)).parameters)[1:] for name in names}


def _shuffled_base(num: int, heldout: int, seed: int, turns: int | None, classes: Sequence[str] | None) -> list[Entry]:
    fitting = [
        entry
        for entry in entries("base")
        if (turns is None or len(entry.questions) <= turns)
        and (classes is None or set(entry.involved_classes) <= set(classes))
    ]
    if len(fitting) < num + heldout:
        raise ValueError(
            f"{num} + {heldout} tasks are asked for, but BFCL has {len(fitting)} of this kind. Ask for fewer, or allow "
            "more turns or classes."
        )
    random.Random(seed).shuffle(fitting)
    return fitting


def _number(entry: Entry) -> str:
    return entry.id.rsplit("_", 1)[1]


def _prompt_line(entry: Entry) -> dict[str, Any]:
    return {"id": entry.id, "messages": entry.questions[0], "label": None, "metadata": entry.to_metadata()}
