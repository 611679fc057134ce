"""Tasks to train on and held-out ones, of plans that were executed and fulfil what a task must."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from slimrl_tools.progress import count_progress
from slimrl_tools.synthesis.filters import names_one
from slimrl_tools.synthesis.forward.execution import Call, Executor, PlanFailed
from slimrl_tools.synthesis.forward.plan import Plan, filled
from slimrl_tools.synthesis.questions import shares

MAX_ANSWER = 200
"""Characters"""


class Plans(Protocol):
    """Where plans come from."""

    max_tries: int
    """Draws in a row of which none becomes a task"""

    def draw(self, num_steps: int) -> Plan | None: ...


@dataclass(frozen=True, kw_only=True)
class Task:
    plan: Plan
    calls: list[Call]

    @property
    def answer(self) -> str:
        return self.calls[-1].result


class Tasks:
    """
    Args:
        rng: orders the tasks.
    """

    def __init__(self, plans: Plans, executor: Executor, rng: random.Random) -> None:
        self._plans, self._executor, self._rng = plans, executor, rng
        self._known: set[str] = set()
        self._heldout: set[str] = set()
        """The last calls of held-out tasks"""
        self.left_out: Counter[str] = Counter()
        """Reason -> plans that became no task"""
        self._failure = ""

    def draw(self, count: int, max_steps: int, *, heldout: bool) -> list[Task]:
        """So many tasks, in equal parts of each number of calls, in any order.

        Raises:
            ValueError: there are not so many; says how many were found, and how the last plan failed.
        """
        found = []
        title = "held-out tasks" if heldout else "tasks to train on"
        with count_progress(title, count, "tasks") as advance:
            for num_steps, share in shares(count, range(1, max_steps + 1)):
                for number in range(share):
                    task = self._new(num_steps, heldout)
                    if task is None:
                        what = "held-out tasks" if heldout else "tasks to train on"
                        why = ", ".join(f"{times} {reason}" for reason, times in self.left_out.most_common(3))
                        raise ValueError(
                            f"there are not so many plans: {number} of {share} {what} of {num_steps} calls were found. "
                            f"Ask for fewer, or for a smaller --depth. Left out were {why or 'none'}.{self._failure}"
                        )
                    found.append(task)
                    advance(1)
        self._rng.shuffle(found)
        return found

    def _new(self, num_steps: int, heldout: bool) -> Task | None:
        """A task of a plan that was not drawn before; None after the source's `max_tries`."""
        for _ in range(self._plans.max_tries):
            plan = self._plans.draw(num_steps)
            if plan is None:
                self.left_out["not drawn"] += 1
                continue
            task = self._task(plan, heldout)
            if isinstance(task, Task):
                self._known |= {plan.key, plan.question}
                if heldout:
                    self._heldout.add(task.calls[-1].key)
                return task
            self.left_out[task] += 1
        return None

    def _task(self, plan: Plan, heldout: bool) -> Task | str:
        """A task, or why it is none."""
        if {plan.key, plan.question} & self._known:
            return "repeated"
        try:
            calls = self._executor.calls(plan)
        except PlanFailed as failure:
            self._failure = f" The last call that failed: {failure}"
            return "failed"
        results = [call.result for call in calls]
        if not 0 < len(results[-1]) <= MAX_ANSWER or set(results[-1]) & set("{}\n"):
            return "no short answer"
        if names_one(plan.question, results):
            return "names what is looked for"
        if not heldout and {call.key for call in calls} & self._heldout:
            return "held out"
        if not self._gives(plan, results[-1]):
            return "another answer when asked again"
        if self._has_superfluous_step(plan, results):
            return "superfluous step"
        return Task(plan=plan, calls=calls)

    def _gives(self, plan: Plan, answer: str, instead: tuple[int, str] | None = None) -> bool:
        try:
            return self._executor.calls(plan, instead)[-1].result == answer
        except PlanFailed:
            return False

    def _has_superfluous_step(self, plan: Plan, results: Sequence[str]) -> bool:
        """Whether the answer is the same with nothing, or with what a step took, in the place of what it gave."""
        return any(
            self._gives(plan, results[-1], (place, stand_in))
            for place, step in enumerate(plan.steps)
            for stand_in in dict.fromkeys(["", *(filled(one, results) for one in step.inputs)])
        )


def plan_json(task: Task) -> list[dict[str, object]]:
    """The calls of a task as its metadata has them."""
    return [
        {"tool": call.tool, "arguments": call.arguments, "result": call.result, "says": step.says}
        for step, call in zip(task.plan.steps, task.calls, strict=True)
    ]
