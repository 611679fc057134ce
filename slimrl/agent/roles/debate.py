"""A debate (arXiv:1805.00899): two sides argue for one of two answers each, and a judge chooses.

The prompt's metadata has `answers`, two texts, of which the label is the right one if there is a label. Which side
argues for which, and in which order the judge hears of the answers, is drawn by the seed, so that neither is an
advantage. The last line of the judge's turn is `VERDICT: A` or `VERDICT: B`.
"""

import random
import re
from typing import Any

from slimrl.agent.environment import Message, Observation, Turn
from slimrl.data.prompt import Prompt

SIDES, JUDGE = ("side_a", "side_b"), "judge"
VERDICT = re.compile(r"VERDICT:\s*([AB])\W*$", re.IGNORECASE)


class Debate:
    """
    Args:
        rounds: speeches of each side.
    """

    ROLES = (*SIDES, JUDGE)

    def __init__(self, rounds: int = 2) -> None:
        self._rounds = rounds
        self._speeches: list[str] = []

    @classmethod
    def check(cls, rounds: int = 2) -> None:
        """Raises ValueError: there is no speech."""
        if not isinstance(rounds, int) or rounds < 1:
            raise ValueError(f"rounds: {rounds!r} is no whole number from 1")

    async def start(self, prompt: Prompt, *, seed: int, scratch: dict[str, Any]) -> Observation:
        """Raises ValueError: the prompt has not two answers, or its label is neither."""
        answers = prompt.metadata.get("answers")
        if not isinstance(answers, list) or len(set(map(str, answers))) != 2:
            raise ValueError(f"{prompt.prompt_id}: metadata.answers must be two different texts")
        if prompt.label is not None and str(prompt.label) not in map(str, answers):
            raise ValueError(f"{prompt.prompt_id}: the label {prompt.label!r} is none of metadata.answers")
        self._prompt, self._answers = prompt, random.Random(seed).sample([*map(str, answers)], 2)
        return self._next()

    async def step(self, turn: Turn) -> Observation:
        if len(self._speeches) < 2 * self._rounds:
            self._speeches.append(turn.text.strip())
            return self._next()
        found = VERDICT.search(turn.text.strip())
        # A judge who does not choose is wrong, and decides nothing between the sides.
        winner = None if found is None else "AB".index(found[1].upper())
        paid = {side: 0.0 if winner is None else 1.0 if index == winner else -1.0 for index, side in enumerate(SIDES)}
        right = winner is not None and self._answers[winner] == str(self._prompt.label)
        judged = {} if self._prompt.label is None else {JUDGE: float(right)}
        metrics = {"verdicts": float(winner is not None), "right": float(right)}
        return Observation(done=True, role=JUDGE, role_rewards={**paid, **judged}, metrics=metrics, state_id="over")

    async def close(self) -> None:
        """Nothing is held."""

    def _next(self) -> Observation:
        number = len(self._speeches)
        state = f"{self._answers} {self._speeches}"
        if number == 2 * self._rounds:
            return Observation(messages=self._asked(JUDGE_TASK + self._heard()), role=JUDGE, state_id=state)
        side, other = SIDES[number % 2], self._answers[1 - number % 2]
        if number < 2:
            task = SIDE_TASK.format(own=self._answers[number], other=other)
            messages = self._asked(task + self._heard())
        else:
            messages = [{"role": "user", "content": f"The other side says:\n{self._speeches[-1]}\n\nAnswer it."}]
        return Observation(messages=messages, role=side, state_id=state)

    def _asked(self, task: str) -> list[Message]:
        *others, last = self._prompt.messages
        both = f"Answer A: {self._answers[0]}\nAnswer B: {self._answers[1]}"
        return [*others, {**last, "content": f"{last['content']}\n\n{both}\n\n{task}"}]

    def _heard(self) -> str:
        """The speeches so far, as the other side and the judge read them."""
        return "".join(f"\n\nFor answer {'AB'[n % 2]}: {text}" for n, text in enumerate(self._speeches))


SIDE_TASK = "Argue, in a few sentences, that the answer is {own} and not {other}."
JUDGE_TASK = "Two sides argue about this. Say which answer is right; end with the line VERDICT: A or VERDICT: B."
