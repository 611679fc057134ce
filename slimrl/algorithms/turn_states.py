"""States before the turns of a trajectory, where the task gives none: what the policy was last told."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any


def observed_states(messages: Sequence[dict[str, Any]], num_prompt_messages: int, num_turns: int) -> list[str]:
    """A hash before each turn: of the prompt before the first, of the tool results since the last turn before others.

    Turns after equal answers of the tools have equal states, whatever came before: where that does not hold, the task
    gives the states.

    Args:
        messages: of the whole trajectory. The last turn has none if it ended within its thinking.
        num_prompt_messages: messages before the first turn.
    """
    states = []
    told = [_told(message) for message in messages[:num_prompt_messages]]
    for message in messages[num_prompt_messages:]:
        if message["role"] == "assistant":
            states.append(_hash(told))
            told = []
        else:
            told.append(_told(message))
    if len(states) < num_turns:
        states.append(_hash(told))
    assert len(states) == num_turns, "every turn but an unfinished last one has a message"
    return states


def _told(message: dict[str, Any]) -> list[Any]:
    return [message["role"], message["content"]]


def _hash(told: list[list[Any]]) -> str:
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]
