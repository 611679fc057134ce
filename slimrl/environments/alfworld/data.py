"""Draws problems to train on and held-out ones; each is solved by the planner and then played by its plan."""

import contextlib
import random
from collections.abc import Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

import textworld

from slimrl.agent.environment import Turn
from slimrl.environments.alfworld.environment import AlfWorld, load, unload
from slimrl.environments.alfworld.problems import KINDS, MIN_RECEPTACLES, Problem, draw_problem
from slimrl.environments.textworld.data import prompt_of, write_lines

PROMPT = "Do the task in the household. Answer with one command."
MOST_REPEATS = 200
"""Problems in a row that were drawn before, after which there are no more"""


def write(
    out: Path,
    *,
    num: int,
    heldout: int,
    seed: int,
    kinds: Sequence[str] = tuple(KINDS),
    receptacles: int = 10,
    objects: int = 12,
) -> None:
    """Write `train.jsonl` with `num` problems and `heldout.jsonl`, in which the kinds of goals take turns. The same
    arguments give the same files.

    Args:
        kinds: of goals, keys of `problems.KINDS`.
        receptacles: of a room.
        objects: of a room, beside those of the goal.

    Raises:
        ValueError: an argument has no meaning, or there are not so many different problems.
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        raise ValueError(f"kinds: {', '.join(unknown) or 'none'}; there are {', '.join(KINDS)}.")
    if receptacles < MIN_RECEPTACLES:
        raise ValueError(f"receptacles: {receptacles} is less than {MIN_RECEPTACLES}.")
    if objects < 0:
        raise ValueError(f"objects: {objects} is less than 0.")
    problems = _distinct(seed, kinds, receptacles=receptacles, objects=objects)
    lines = list(islice(_solved(problems, seed), num + heldout))
    if len(lines) < num + heldout:
        raise ValueError(f"num, heldout: of this difficulty there are but {len(lines)} problems with seed {seed}.")
    out.mkdir(parents=True, exist_ok=True)
    write_lines(out / "train.jsonl", lines[:num])
    write_lines(out / "heldout.jsonl", lines[num:])


def plan(problem: Problem) -> list[str]:
    """The planner's commands; none if it finds no plan."""
    game = load(problem.pddl, problem.task, textworld.EnvInfos(extras=["walkthrough"]))
    try:
        return list(game.reset()["extra.walkthrough"])
    finally:
        unload(game)


def _distinct(seed: int, kinds: Sequence[str], *, receptacles: int, objects: int) -> Iterator[Problem]:
    """Problems of different content, until MOST_REPEATS in a row are not new."""
    seen: set[str] = set()
    repeats = 0
    for number in count():
        kind = kinds[number % len(kinds)]
        problem = draw_problem(kind, random.Random(f"{seed}:{number}"), receptacles=receptacles, objects=objects)
        if problem.pddl not in seen:
            seen.add(problem.pddl)
            repeats = 0
            yield problem
        elif (repeats := repeats + 1) == MOST_REPEATS:
            return


def _solved(problems: Iterator[Problem], seed: int) -> Iterator[dict[str, Any]]:
    """Lines of prompt files, of the problems that the planner's plan solves in the environment."""
    for number, problem in enumerate(problems):
        metadata = {"kind": problem.kind, "task": problem.task, "problem": problem.pddl, "walkthrough": plan(problem)}
        line = {"id": f"alfworld:{seed}:{number}", "prompt": PROMPT, "label": None, "metadata": metadata}
        if metadata["walkthrough"] and _is_won(line):
            yield line


def _is_won(line: dict[str, Any]) -> bool:
    with contextlib.closing(AlfWorld()) as environment:
        observation = environment.start(prompt_of(line), seed=0, scratch={})
        for index, command in enumerate(line["metadata"]["walkthrough"]):
            observation = environment.step(Turn(index=index, text=command))
    return observation.metrics.get("success") == 1.0
