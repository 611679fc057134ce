"""Plays an episode by a scripted player, without a model."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from slimrl.agent.environment import Environment, Observation, Turn
from slimrl.data.prompt import Prompt


class Player(Protocol):
    """A policy by script, made with a prompt and a seed."""

    def turn(self, observation: Observation) -> Turn:
        """What it says to an observation; the number of the turn is filled in."""
        ...


@dataclass(kw_only=True)
class PlayedEpisode:
    observations: list[Observation]
    """The start and what each turn led to"""
    turns: list[Turn] = field(default_factory=list)
    scratch: dict[str, Any] = field(default_factory=dict)

    @property
    def total_reward(self) -> float:
        """Sum of the rewards of the steps, to nine decimals: shares such as 1/9 add up to 1."""
        return round(sum(observation.reward or 0.0 for observation in self.observations), 9)

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of each name."""
        return {name: value for observation in self.observations for name, value in observation.metrics.items()}


async def play(
    make: Callable[[], Environment],
    prompt: Prompt,
    player: Player,
    *,
    seed: int,
    max_turns: int,
    on_turn: Callable[[Turn | None, Observation], None] = lambda turn, observation: None,
) -> PlayedEpisode:
    """Play until the environment ends the episode, or for so many turns.

    Args:
        on_turn: called with each turn and what it led to; with None and the start first.
    """
    scratch: dict[str, Any] = {}
    environment = make()
    try:
        observation = await environment.start(prompt, seed=seed, scratch=scratch)
        episode = PlayedEpisode(observations=[observation], scratch=scratch)
        on_turn(None, observation)
        for index in range(max_turns):
            turn = replace(player.turn(observation), index=index, is_last=index == max_turns - 1)
            observation = await environment.step(turn)
            episode.turns.append(turn)
            episode.observations.append(observation)
            on_turn(turn, observation)
            if observation.done or observation.truncated:
                break
    finally:
        await environment.close()
    return episode
