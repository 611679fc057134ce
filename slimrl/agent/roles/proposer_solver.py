"""A proposer makes up a task whose answer code computes, and several solvers answer it, each without the others.

The proposer and the solvers are one policy, which so makes its own data (Absolute Zero, arXiv:2505.03335). Solvers are
paid for the right answer, and compared with the others of the episode, who had the same task. The proposer is paid
4p(1-p), where p is the solvers' success rate: nothing where all or none are right, most where half are. p(1-p) is the
learnability of a task (arXiv:2408.15099); Absolute Zero pays 1-p where some are right, so more for what hardly anyone
solves. A text that is no task costs it 1.

The prompt says what is to be made up. Its metadata may have `contains`, a list of texts that the task must have as
whole words, so that not always the same is made up; or `task`, one that the solvers get at once, without a proposer.
"""

import asyncio
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from slimrl.agent.environment import Message, Observation, Turn
from slimrl.agent.roles.writer_critic import BOX
from slimrl.config.import_path import resolve
from slimrl.data.prompt import Prompt

PROPOSER, GROUP, MAX_SOLVERS = "proposer", "solvers", 16
SOLVERS = tuple(f"solver_{number}" for number in range(1, MAX_SOLVERS + 1))
INVALID = -1.0
"""What a proposer is paid for a text that is no task"""
ARITHMETIC = "slimrl.agent.roles.arithmetic:answer_of"
_TASK = re.compile(r"<task>(.*?)</task>", re.DOTALL)
_NUMBER = re.compile(r"[+-]?\d{1,100}(?:[./]\d{1,100})?", re.ASCII)

Verifier = Callable[[str], str | None]
"""The answer to a task, the same each time; None for a text that is no task"""


class ProposerSolver:
    """
    Args:
        num_solvers: who answer a task.
        verifier: `module:function` of a Verifier, which is called in a thread.
    """

    ROLES = (PROPOSER, *SOLVERS)

    def __init__(self, num_solvers: int = 4, verifier: str = ARITHMETIC) -> None:
        self._solvers = SOLVERS[:num_solvers]
        self._verify: Verifier = resolve(verifier)
        self._task = ""
        self._answer: str | None = None
        self._is_proposed = False
        self._right: list[float] = []

    @classmethod
    def check(cls, num_solvers: int = 4, verifier: str = ARITHMETIC) -> None:
        """Raises ValueError: a solver would have nobody to be compared with, or there is no such verifier."""
        if not isinstance(num_solvers, int) or not 2 <= num_solvers <= MAX_SOLVERS:
            raise ValueError(f"num_solvers: {num_solvers!r} is no whole number from 2 to {MAX_SOLVERS}")
        resolve(verifier)

    async def start(self, prompt: Prompt, *, seed: int, scratch: dict[str, Any]) -> Observation:
        """Raises ValueError: the metadata has a task that is none, or `contains` is no list of texts."""
        self._prompt = prompt
        self._contains = prompt.metadata.get("contains", [])
        if not isinstance(self._contains, list) or not all(isinstance(one, str) for one in self._contains):
            raise ValueError(f"{prompt.prompt_id}: metadata.contains is {self._contains!r}, no list of texts")
        if "task" in prompt.metadata:
            if not await self._takes(str(prompt.metadata["task"])):
                raise ValueError(f"{prompt.prompt_id}: metadata.task is no task: {prompt.metadata['task']!r}")
            return self._asked({})
        self._is_proposed = True
        *others, last = prompt.messages
        messages = [*others, {**last, "content": f"{last['content']}\n\n{PROPOSER_TASK}"}]
        return Observation(messages=messages, role=PROPOSER, state_id="")

    async def step(self, turn: Turn) -> Observation:
        if self._answer is None:
            found = _TASK.findall(turn.text)
            if not found or not await self._takes(found[-1].strip()):
                paid, metrics = {PROPOSER: INVALID}, {"valid_tasks": 0.0}
                return Observation(done=True, role=PROPOSER, role_rewards=paid, metrics=metrics, state_id="over")
            return self._asked({})
        self._right.append(float(self._is_right(turn.text)))
        paid = {self._solvers[len(self._right) - 1]: self._right[-1]}
        return self._asked(paid) if len(self._right) < len(self._solvers) else self._over(paid)

    async def close(self) -> None:
        """Nothing is held."""

    async def _takes(self, task: str) -> bool:
        """Whether a text is a task that was asked for; it is the episode's then."""
        if not all(re.search(rf"(?<!\w){re.escape(one)}(?!\w)", task) for one in self._contains):
            return False
        answer = await asyncio.to_thread(self._verify, task)
        self._task, self._answer = task, answer
        return answer is not None

    def _asked(self, paid: dict[str, float]) -> Observation:
        """The next solver's turn."""
        system: list[Message] = [one for one in self._prompt.messages if one["role"] == "system"]
        return Observation(
            messages=[*system, {"role": "user", "content": f"{self._task}\n\n{SOLVER_TASK}"}],
            role=self._solvers[len(self._right)],
            group=GROUP,
            role_rewards=paid,
            state_id=f"{self._task} {self._right}",
        )

    def _over(self, paid: dict[str, float]) -> Observation:
        rate = sum(self._right) / len(self._right)
        metrics = {"solved": rate}
        if self._is_proposed:
            paid = {**paid, PROPOSER: 4 * rate * (1 - rate)}
            metrics |= {"valid_tasks": 1.0, "learnable_tasks": float(0 < rate < 1)}
        return Observation(done=True, role=self._solvers[-1], role_rewards=paid, metrics=metrics, state_id="over")

    def _is_right(self, text: str) -> bool:
        found = BOX.findall(text)
        return bool(found) and self._answer is not None and _is_same(found[-1].strip(), self._answer.strip())


def _is_same(given: str, answer: str) -> bool:
    """Whether two answers are one text, or one number."""
    if _NUMBER.fullmatch(given) and _NUMBER.fullmatch(answer):
        try:
            return Fraction(given) == Fraction(answer)
        except ZeroDivisionError:
            return False
    return given == answer


PROPOSER_TASK = "Write it between <task> and </task>."
SOLVER_TASK = "Put the answer in \\boxed{}."
