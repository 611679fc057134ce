"""Prompt files of tasks of MiniWoB++: lists of tasks and seeds."""

import random
from pathlib import Path
from typing import Any

from slimrl.base.jsonl import write_lines
from slimrl.environments.miniwob.actions import HELP
from slimrl.environments.miniwob.demonstrations import conversations
from slimrl.environments.miniwob.environment import no_task
from slimrl.environments.miniwob.environment import tasks as known_tasks

HELDOUT_SEEDS, TRAIN_SEEDS = range(0, 1000), range(1000, 1_000_000)
"""Seeds of the pages, which are drawn from them"""


DEFAULT_TASKS = "click-button,click-link,click-checkboxes,click-tab-2,enter-text,login-user,choose-list,email-inbox"


def write(
    out: Path,
    *,
    num: int,
    heldout: int,
    seed: int,
    tasks: str = DEFAULT_TASKS,
    instructions: str = HELP,
    demonstrations: int = 0,
) -> None:
    """Write `train.jsonl` and `heldout.jsonl`; no page of one is in the other, and each task is as often as the others.

    Args:
        num: training prompts.
        heldout: held-out prompts.
        seed: equal seeds give equal files.
        tasks: names of tasks, with commas between them.
        instructions: what the policy is told before the goal and the page.
        demonstrations: conversations in `sft.jsonl`, for the cold start of a toy (demonstrations.py); 0 for no file.

    Raises:
        ValueError: there is no such task, or there are not as many seeds.
    """
    names = [name.strip() for name in tasks.split(",")]
    if unknown := [name for name in names if name not in known_tasks()]:
        raise ValueError(no_task(unknown[0]))
    rng, demonstrations_rng = random.Random(seed), random.Random(f"demonstrations {seed}")
    out.mkdir(parents=True, exist_ok=True)
    for stem, count, seeds in (("train", num, TRAIN_SEEDS), ("heldout", heldout, HELDOUT_SEEDS)):
        per_task = -(-count // len(names))
        if per_task > len(seeds):
            raise ValueError(f"{stem}: {count} prompts of {len(names)} tasks need more than the {len(seeds)} seeds")
        drawn = {name: rng.sample(seeds, per_task) for name in names}
        lines = [_line(names[i % len(names)], drawn[names[i % len(names)]][i // len(names)], instructions)
                 for i in range(count)]  # fmt: skip
        rng.shuffle(lines)
        write_lines(out / f"{stem}.jsonl", lines)
    if demonstrations:
        write_lines(out / "sft.jsonl", conversations(demonstrations, instructions, demonstrations_rng))


def _line(task: str, seed: int, instructions: str) -> dict[str, Any]:
    return {
        "id": f"{task}:{seed}",
        "prompt": instructions,
        "label": None,
        "metadata": {"task": task, "seed": seed},
    }
