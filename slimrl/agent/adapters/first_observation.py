"""How an episode begins whose prompt says the task and whose environment says the state."""

from typing import Any

from slimrl.agent.environment import Message, Observation
from slimrl.data.prompt import Prompt

MAX_SEED = 2**31 - 1
"""Environments pass the seed on to generators of 32 bits."""


def first_observation(prompt: Prompt, text: str, *, state_id: str | None = None, **more: Any) -> Observation:
    """The prompt's messages, with a text at the end of the last one.

    Args:
        state_id: of the state; None if the text says the whole state.
        more: further fields of the observation.
    """
    *others, last = prompt.messages
    return Observation(
        messages=[*others, {**last, "content": f"{last['content']}\n\n{text}"}],
        state_id=text if state_id is None else state_id,
        **more,
    )


def reset_seed(prompt: Prompt, seed: int) -> int:
    """The seed of the prompt's metadata, with which all its trajectories begin alike, or else the trajectory's own."""
    return int(prompt.metadata.get("seed", seed % MAX_SEED))


def user(text: str) -> Message:
    return {"role": "user", "content": text}
