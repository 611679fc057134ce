"""Draws problems to train on and held-out ones; each is solved by the planner and then played by its plan."""

import contextlib
import random
from collections.abc import Iterator, Sequence
from itertools import count, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import textworld

from slimrl.agent.environment import Turn
from slimrl.base.jsonl import write_lines
from slimrl.environments.alfworld.environment import AlfWorld, load, unload
from slimrl.environments.alfworld.problems import KINDS, MIN_RECEPTACLES, Problem, draw_problem
from slimrl.environments.data_files import prompt_of

PROMPT = "Do the task in the household. Answer with one command."
PROBLEMS_PER_PROCESS = 50
"""A process keeps some memory of each problem, so it is replaced after so many."""
MOST_REPEATS = 200
"""Problems in a row that were drawn before, after which there are no more"""


def write(
    out: Path,
    *,
    num: int,
    heldout: int,
    seed: int,
    processes: int = 1,
    kinds: str = "",
    receptacles: int = 10,
    objects: int = 12,
) -> None:
    """Write `train.jsonl` with `num` problems and `heldout.jsonl`, in which the kinds of goals take turns. The same
    arguments give the same files.

    Args:
        processes: problems that are solved at a time.
        kinds: of goals, names of `problems.KINDS` separated by commas; all of them if it is empty.
        receptacles: of a room.
        objects: of a room, beside those of the goal.

    Raises:
        ValueError: an argument has no meaning, or there are not so many different problems.
    """
    names = kinds.split(",") if kinds else list(KINDS)
    if unknown := [name for name in names if name not in KINDS]:
        raise ValueError(f"kinds: {', '.join(unknown)}; there are {', '.join(KINDS)}.")
    if receptacles < MIN_RECEPTACLES:
        raise ValueError(f"receptacles: {receptacles} is less than {MIN_RECEPTACLES}.")
    if objects < 0:
        raise ValueError(f"objects: {objects} is less than 0.")
    problems = list(islice(_distinct(seed, names, receptacles=receptacles, objects=objects), num + heldout))
    if len(problems) < num + heldout:
        raise ValueError(f"num, heldout: of this difficulty there are but {len(problems)} problems with seed {seed}.")
    tasks = [(f"alfworld:{seed}:{number}", problem) for number, problem in enumerate(problems)]
    with get_context("fork").Pool(processes, maxtasksperchild=PROBLEMS_PER_PROCESS) as pool:
        lines = pool.map(_solved_line, tasks, chunksize=1)
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


def _solved_line(task: tuple[str, Problem]) -> dict[str, Any]:
    """A line of a prompt file, of a problem that the planner's plan solves in the environment.

    Args:
        task: the prompt's id, and the problem.
    """
    name, problem = task
    metadata = {"kind": problem.kind, "task": problem.task, "problem": problem.pddl, "walkthrough": plan(problem)}
    line = {"id": name, "prompt": PROMPT, "label": None, "metadata": metadata}
    assert _is_won(line), f"{name}: {metadata['walkthrough']} does not solve {problem.pddl}"
    return line


def _is_won(line: dict[str, Any]) -> bool:
    with contextlib.closing(AlfWorld()) as environment:
        observation = environment.start(prompt_of(line), seed=0, scratch={})
        for index, command in enumerate(line["metadata"]["walkthrough"]):
            observation = environment.step(Turn(index=index, text=command))
    return observation.metrics.get("success") == 1.0
