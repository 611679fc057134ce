"""A game of TextWorld (arXiv:1806.11532) as an environment; `data.py` makes the games."""

import copy
import re
from pathlib import Path
from typing import Any, Self

import textworld
from textworld.generator.data import KnowledgeBase

from slimrl.agent.environment import Observation
from slimrl.data.prompt import Prompt
from slimrl.environments.textworld.text_game import TextGame, check_flags

INFOS = textworld.EnvInfos(
    facts=True,
    admissible_commands=True,
    score=True,
    max_score=True,
    won=True,
    lost=True,
    objective=True,
    description=True,
    verbs=True,
)
# TextWorld reads the rules of its world from each game and keeps what it has parsed. Done here, before processes are
# forked, this takes 0.2 s from the start of each episode.
KnowledgeBase.deserialize(KnowledgeBase.default().serialize())
SHORT_FORMS = frozenset(("n", "s", "e", "w", "north", "south", "east", "west", "x", "l", "i", "get"))
"""First words of commands beside the game's own verbs. The interpreter also obeys words that are no part of the game:
`save` and `script` write files, `restart` and `restore` lead to states whose facts nothing follows, `quit` ends the
interpreter, and `tw-...` switches off what the score is read from."""
SEVERAL = re.compile(r"[.,;:\"]|\b(then|and|all)\b", re.IGNORECASE)
"""What makes several commands of one"""
UNCHANGING = ("examine ", "inventory", "look")
"""Starts of the commands that change nothing"""
UNKNOWN_VERB = "That's not a verb I recognise."
"""The answer of Inform, in which the games are written, to a word that it does not know"""
ONE_AT_A_TIME = "One command at a time."


class TextWorld(TextGame):
    """One game in a `.z8` file, whose `.json` file lies beside it."""

    def __init__(self, show_commands: bool = True, brief: bool = False) -> None:
        """
        Args:
            show_commands: list the admissible commands in every message.
            brief: for a small model: the start has the objective alone, answers have one line, and the list leaves
                out commands that change nothing. They still work.
        """
        super().__init__(show_commands)
        self._brief = brief

    @classmethod
    def check(cls, show_commands: bool = True, brief: bool = False) -> None:
        """Raises ValueError: an argument of another type."""
        check_flags(show_commands=show_commands, brief=brief)

    def start(self, prompt: Prompt, *, seed: int, scratch: dict[str, Any]) -> Observation:
        """Raises ValueError: the game's files are not there."""
        path = Path(prompt.metadata["game"])
        for file in (path, path.with_suffix(".json")):
            if not file.is_file():
                raise ValueError(f"{file}: no such file of a game. Write the data again where the games are to be.")
        self._game = textworld.start(str(path), INFOS)
        self._state = self._game.reset()
        text = _tidy(self._state.objective)
        if not self._brief:
            text += f"\n\n{_tidy(self._state.description)}"
        return self._begin(prompt, text, self._state.max_score)

    def copy(self, *, scratch: dict[str, Any]) -> Self:
        other = copy.copy(self)
        other._game, other._state = self._game.copy(), self._state.copy()
        return other

    def close(self) -> None:
        if self._game is not None:
            self._game.close()

    def _refusal(self, command: str) -> str:
        if command in self._state.admissible_commands:
            return ""
        if SEVERAL.search(command):
            return ONE_AT_A_TIME
        first = command.lower().partition(" ")[0]
        return "" if first in SHORT_FORMS or first in self._state.verbs else UNKNOWN_VERB

    def _shown(self, feedback: str) -> str:
        text = _tidy(feedback.partition("\n>")[0])
        return text.partition("\n")[0] if self._brief else text

    def _is_listed(self, command: str) -> bool:
        return not self._brief or not command.startswith(UNCHANGING)


def _tidy(text: str) -> str:
    return re.sub(r"\s*\n\s*", "\n", text).strip()
