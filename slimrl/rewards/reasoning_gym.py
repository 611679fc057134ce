"""Reward of tasks of reasoning-gym (github.com/open-thought/reasoning-gym): the score of the library's own scorer.

Prompt files come from `slimrl-tools prepare reasoning-gym`, whose metadata has the task and its entry. The scorers run
in separate processes (reasoning_gym_scorer.py).
"""

import logging
import re
from enum import Enum
from pathlib import Path
from typing import Any

from slimrl.base.answering_process import OutOfCpuTime, ProcessFailed
from slimrl.base.extras import needs_extra
from slimrl.base.threads import in_thread
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Trajectory
from slimrl.rewards.limited_processes import LimitedProcesses, one_per_core
from slimrl.rewards.texts import AnswerPlace, boxed, last_text, tagged

PACKAGE, EXTRA = "reasoning_gym", "reasoning"
ANYWHERE = "any"
"""Value of `answer_in` that looks in several places"""
KEPT_BYTES = 400 * 1024**2
"""Resident memory with which a process is not kept; a ready one has about 120 MiB."""
_SAID = re.compile(r"\banswer(?: is)?\W{0,3}:\**", re.IGNORECASE)
_NUMBER = re.compile(r"(?:(?<![\w.)])[-+])?(?:\d+(?:,\d{3}(?!\d))*(?:\.\d+)?|(?<!\w)\.\d+)")
_MARKS = "*`$ \t"

log = logging.getLogger(__name__)


class Credit(str, Enum):
    fraction = "fraction"
    """The library's score, which for many tasks has parts for answers that are nearly right or merely readable."""
    all = "all"
    """1.0 where the library gives 1, else 0.0."""


class ReasoningGym:
    """
    Args:
        answer_in: where the answer stands, see AnswerPlace; or `any`, see `any_answer`.
        credit: `fraction` or `all`.

    Raises:
        ValueError: a wrong setting, or the package is not installed.
    """

    def __init__(self, *, answer_in: str = ANYWHERE, credit: str = "fraction") -> None:
        needs_extra(PACKAGE, EXTRA)
        if credit not in list(Credit):
            raise ValueError(f"credit: {credit!r} is neither fraction nor all")
        self._place = None if answer_in == ANYWHERE else AnswerPlace(answer_in)
        self._credit = Credit(credit)
        self._checked = set[str]()
        self._processes = LimitedProcesses(
            Path(__file__).with_name("reasoning_gym_scorer.py"),
            work="scores answers of reasoning-gym",
            request="scorer",
            max_processes=one_per_core(),
            kept_bytes=KEPT_BYTES,
        )

    def check_prompt(self, prompt: Prompt) -> None:
        """Raises ValueError if the metadata has no task and entry of reasoning-gym; of the first prompt of each task
        also if the entry's own answer does not earn 1."""
        task, entry = _task_and_entry(prompt)
        if task in self._checked:
            return
        self._checked.add(task)
        try:
            earned = self._ask(task, entry, entry["answer"] or "")
        except (ProcessFailed, OutOfCpuTime) as error:
            raise ValueError(f"metadata.task {task}: {error}") from error
        if entry["answer"] is not None and earned != 1:
            raise ValueError(f"metadata.entry of {task}: its own answer earns {earned:g}, and not 1")

    async def close(self) -> None:
        """End the processes."""
        await in_thread(self._processes.close)

    def __call__(self, trajectory: Trajectory, prompt: Prompt) -> float:
        """The score of the answer; 0 without one. A scorer that exceeds its CPU time limit counts as 0 and sets
        `metadata["reward_timed_out"]`.

        Raises:
            ValueError: the prompt is none of reasoning-gym.
            ProcessFailed: a process failed; what the answer is worth is unknown.
        """
        task, entry = _task_and_entry(prompt)
        answer = any_answer(last_text(trajectory) or "", entry["answer"]) if self._place is None else (
            self._place.of(trajectory)
        )  # fmt: skip
        if not answer:
            return 0.0
        try:
            score = self._ask(task, entry, answer)
        except OutOfCpuTime as error:
            log.warning("%s counts as wrong: %s: %r", trajectory.trajectory_id, error, answer)
            trajectory.metadata["reward_timed_out"] = True
            return 0.0
        return score if self._credit is Credit.fraction else float(score == 1)

    def _ask(self, task: str, entry: dict[str, Any], answer: str) -> float:
        score = self._processes.ask([task, entry, answer])
        if not isinstance(score, float) or not 0 <= score <= 1:
            raise ProcessFailed(f"the scorer of {task} gave no number from 0 to 1: {score}")
        return score


def any_answer(text: str, label: str | None) -> str:
    """The answer in a text that follows no fixed form; empty if there is none.

    It is the last \\boxed{}, else the last `<answer>`, else what stands behind the last `Answer:`, else the end of the
    text. There it has as many lines as the label, without empty ones if the label has none, and if that is a number it
    is the last number in them. Only one answer is looked at, so that a list of guesses earns nothing.
    """
    inner = (boxed(text) or tagged(text, "answer") or "").strip()
    if inner:
        return inner
    said = list(_SAID.finditer(text))
    behind = text[said[-1].end() :].strip(_MARKS + "\n") if said else ""
    rows = (label or "").strip("\n").split("\n")
    # Boards may have rows of spaces.
    blank_counts = not all(map(str.strip, rows))
    lines = [
        line
        for line in (behind or text).strip("\n").split("\n")
        if line.strip(_MARKS) or (blank_counts and not line.strip())
    ]
    ending = lines[: len(rows)] if behind else lines[-len(rows) :]
    answer = "\n".join(ending).strip() if len(rows) > 1 else "".join(ending).strip(_MARKS)
    if label is not None and _NUMBER.fullmatch(label.strip()):
        return next(iter(_NUMBER.findall(answer.replace("\N{MINUS SIGN}", "-"))[::-1]), "")
    if (label or "").endswith("."):
        return answer
    return answer.removesuffix(".").rstrip(_MARKS) if len(rows) == 1 else answer.removesuffix(".")


def _task_and_entry(prompt: Prompt) -> tuple[str, dict[str, Any]]:
    task, entry = prompt.metadata.get("task"), prompt.metadata.get("entry")
    if not isinstance(task, str) or not isinstance(entry, dict) or not {"answer", "metadata"} <= entry.keys():
        raise ValueError(
            "metadata.task and metadata.entry are not those of a task of reasoning-gym; "
            "`slimrl-tools prepare reasoning-gym TASKS OUT` writes such files"
        )
    return task, entry
