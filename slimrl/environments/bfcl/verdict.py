"""The package's own checker, run on the calls that the policy made.

The checker keeps its objects as globals of a module, by names that begin with the model's. They are removed after each
run, so the next one begins with new objects.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import isfunction
from typing import Any

from slimrl.environments.bfcl.calls import kept_defaults
from slimrl.environments.bfcl.entry import Entry
from slimrl.environments.bfcl.package import CHECKERS_OBJECTS, CLASSES, multi_turn_checker

MODEL = "slimrl_episode"
"""Name of the model that the checker is told"""

Calls = Sequence[Sequence[Sequence[str]]]
"""Python calls by user turn and step"""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    valid: bool
    progress: float
    """Fraction of the user turns with a ground truth that passed, up to the first one that did not; 1 exactly if
    valid"""
    problem: str = ""
    """The checker's `error_type` of the first user turn that did not pass"""


def judge(entry: Entry, calls: Calls) -> Verdict:
    """Whether the calls of an episode do what the ground truth does, after every user turn.

    Args:
        calls: of the user turns that the policy has finished, from the first on.
    """
    num_turns = len(entry.ground_truth)
    problem = _problem(entry, calls, num_turns) if len(calls) == num_turns else "multi_turn:force_terminated"
    if problem is None:
        return Verdict(valid=True, progress=1.0)
    num_passed = 0
    while num_passed < min(len(calls), num_turns - 1) and _problem(entry, calls, num_passed + 1) is None:
        num_passed += 1
    asked = [bool(turn) for turn in entry.ground_truth]
    return Verdict(valid=False, progress=sum(asked[:num_passed]) / max(1, sum(asked)), problem=problem)


def _problem(entry: Entry, calls: Calls, num_turns: int) -> str | None:
    """The checker's `error_type` for the first user turns alone; None if they are valid."""
    made = {"id": entry.id, "initial_config": entry.initial_config, "involved_classes": entry.involved_classes}
    category = entry.id.rsplit("_", 1)[0]
    with _nothing_kept(entry.involved_classes):
        try:
            found: dict[str, Any] = multi_turn_checker(
                [[list(step) for step in turn] for turn in calls[:num_turns]],
                entry.ground_truth[:num_turns],
                made,
                category,
                MODEL,
            )
        except RecursionError:
            # A folder that was copied into itself; it has no end to compare.
            return "multi_turn:endless_state"
    return None if found["valid"] else str(found["error_type"])


@contextmanager
def _nothing_kept(class_names: Sequence[str]) -> Iterator[None]:
    """Remove the checker's objects afterwards, and give the classes' methods their default arguments again."""
    functions = [each for name in class_names for each in vars(CLASSES[name]).values() if isfunction(each)]
    try:
        with kept_defaults(functions):
            yield
    finally:
        for variable in [each for each in CHECKERS_OBJECTS if each.startswith(MODEL)]:
            del CHECKERS_OBJECTS[variable]
