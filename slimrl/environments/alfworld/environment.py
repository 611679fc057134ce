"""A game of ALFWorld's domain (arXiv:2010.03768) as an environment; `data.py` draws the problems."""

from typing import Any

import textworld
from textworld.envs.pddl import PddlEnv

from slimrl.agent.environment import Observation
from slimrl.data.prompt import Prompt
from slimrl.environments.alfworld import wheel
from slimrl.environments.textworld.text_game import TextGame, check_flags

INFOS = textworld.EnvInfos(facts=True, admissible_commands=True, won=True)
NOTED_ALONE = ("checked", "examined", "wasinreceptacle")
"""Predicates that no command and no goal needs"""


class AlfWorld(TextGame):
    """The problem in a prompt's `metadata["problem"]`, with `metadata["task"]` as what the policy is told to do."""

    def __init__(self, show_commands: bool = True) -> None:
        """
        Args:
            show_commands: list the admissible commands in every message.
        """
        super().__init__(show_commands)

    @classmethod
    def check(cls, show_commands: bool = True) -> None:
        """Raises ValueError: an argument of another type."""
        check_flags(show_commands=show_commands)

    def start(self, prompt: Prompt, *, seed: int, scratch: dict[str, Any]) -> Observation:
        self._game = load(prompt.metadata["problem"], prompt.metadata["task"], INFOS)
        self._state = self._game.reset()
        return self._begin(prompt, self._shown(self._state.feedback))

    def close(self) -> None:
        if self._game is not None:
            unload(self._game)

    def _spelled(self, command: str) -> str:
        return command.lower()

    def _counts(self, fact: Any) -> bool:
        return fact.name not in NOTED_ALONE


def load(problem: str, task: str, infos: textworld.EnvInfos) -> PddlEnv:
    """A game of which nothing but memory is used.

    Args:
        problem: PDDL in ALFWorld's domain.
        task: what the policy is told to do.
    """
    game = PddlEnv(infos)
    game.load({"pddl_domain": wheel.domain(), "grammar": wheel.grammar(task), "pddl_problem": problem})
    for entity in game._entity_infos.values():
        entity.name = entity.id.replace("_", " ")
    return game


def unload(game: PddlEnv) -> None:
    """Free what the planner's library holds. The library itself stays, about 2 MiB for each game: a process that closed
    one crashes at its end."""
    game.downward_lib.cleanup()
