"""A writer answers, a critic says what is wrong, the writer answers again.

Both are paid for the last answer, in `\\boxed{}`, if it is the label; the critic also for what it changed: the reward
of the last answer less that of the first.
"""

import re
from typing import Any

from slimrl.agent.environment import Message, Observation, Turn
from slimrl.data.prompt import Prompt

WRITER, CRITIC = "writer", "critic"
BOX = re.compile(r"\\boxed\{([^{}]*)\}")


class WriterCritic:
    """
    Args:
        rounds: times that the critic is asked.
    """

    ROLES = (WRITER, CRITIC)

    def __init__(self, rounds: int = 1) -> None:
        self._rounds = rounds
        self._drafts: list[str] = []

    @classmethod
    def check(cls, rounds: int = 1) -> None:
        """Raises ValueError: the critic would not be asked."""
        if not isinstance(rounds, int) or rounds < 1:
            raise ValueError(f"rounds: {rounds!r} is no whole number from 1")

    async def start(self, prompt: Prompt, *, seed: int, scratch: dict[str, Any]) -> Observation:
        """Raises ValueError: the prompt has no label."""
        if prompt.label is None:
            raise ValueError(f"{prompt.prompt_id}: has no label, which says whether an answer is right")
        self._prompt, self._asks_critic = prompt, False
        return Observation(messages=self._asked(WRITER_TASK), role=WRITER, state_id="[]")

    async def step(self, turn: Turn) -> Observation:
        said = turn.text.strip()
        if self._asks_critic:
            self._asks_critic = False
            messages: list[Message] = [{"role": "user", "content": f"A reader says:\n{said}\n\nAnswer again."}]
            return Observation(messages=messages, role=WRITER, state_id=f"{self._drafts} {said}")
        self._drafts.append(said)
        if len(self._drafts) > self._rounds:
            return self._over()
        self._asks_critic = True
        first = len(self._drafts) == 1
        text = f"The answer is:\n{said}\n\n{CRITIC_TASK}" if first else f"The new answer is:\n{said}\n\n{CRITIC_TASK}"
        messages = self._asked(text) if first else [{"role": "user", "content": text}]
        return Observation(messages=messages, role=CRITIC, state_id=str(self._drafts))

    async def close(self) -> None:
        """Nothing is held."""

    def _asked(self, task: str) -> list[Message]:
        *others, last = self._prompt.messages
        return [*others, {**last, "content": f"{last['content']}\n\n{task}"}]

    def _over(self) -> Observation:
        first, last = self._is_right(self._drafts[0]), self._is_right(self._drafts[-1])
        return Observation(
            done=True,
            role=WRITER,
            role_rewards={WRITER: last, CRITIC: last + last - first},
            metrics={"first_right": first, "last_right": last},
            state_id="over",
        )

    def _is_right(self, text: str) -> float:
        found = BOX.findall(text)
        return float(bool(found) and found[-1].strip() == str(self._prompt.label).strip())


WRITER_TASK = "Put the answer in \\boxed{}."
CRITIC_TASK = "Say in a few sentences what is wrong with it, or that it is right. Do not give an answer yourself."
