"""A game of TextWorldExpress (arXiv:2208.01174) as an environment; `data.py` draws the games."""

import re
from typing import Any, ClassVar

from slimrl.agent.environment import Observation
from slimrl.data.prompt import Prompt
from slimrl.environments.textworld.text_game import TextGame, check_flags
from slimrl.environments.textworld_express.game import Game
from slimrl.environments.textworld_express.java import Java, find_java

UNCHANGING = ("examine ", "inventory", "look around", "task")
"""Starts of the commands that change nothing"""
SHARING_THINGS = ("sorting",)
"""Kinds whose games have the same things if they have the same problem: what one of them moves is gone from the others,
so each game needs a Java machine of its own"""
UNKNOWN = "Unknown action: I'm not sure what you mean."
"""The package's answer to what is no command now"""
_END_OF_SENTENCE = re.compile(r"(?<=[.!?])\s")


class TextWorldExpress(TextGame):
    """The game that a prompt's metadata names by `game`, `params`, `fold` and `seed`."""

    _java: ClassVar[Java | None] = None
    """The Java machine of all instances of this process and its children"""

    def __init__(self, show_commands: bool = True, brief: bool = False) -> None:
        """
        Args:
            show_commands: list the admissible commands in every message.
            brief: for a small model: of the task and of each answer the first sentence alone, and the list leaves out
                commands that change nothing. They still work.
        """
        super().__init__(show_commands)
        self._brief = brief
        self._own_java: Java | None = None

    @classmethod
    def check(cls, show_commands: bool = True, brief: bool = False) -> None:
        """Raises ValueError: an argument of another type, or there is no Java."""
        check_flags(show_commands=show_commands, brief=brief)
        find_java()

    @classmethod
    def share(cls, show_commands: bool = True, brief: bool = False) -> None:
        """Start the Java machine that all instances use; it ends with this process."""
        cls._java = Java()

    @classmethod
    def java(cls) -> Java:
        """What `share` started."""
        assert cls._java is not None, "share was not called"
        return cls._java

    def start(self, prompt: Prompt, *, seed: int, scratch: dict[str, Any]) -> Observation:
        """Raises ValueError: there is no such game."""
        named = {name: prompt.metadata[name] for name in ("game", "params", "fold", "seed")}
        if named["game"] in SHARING_THINGS:
            self._own_java = Java()
        java = self._own_java or self.java()
        self._game = Game(java.connect(), named["game"], named["params"], named["seed"], named["fold"])
        self._state = self._game.state
        return self._begin(prompt, f"{self._shown(self._game.task)}\n{self._shown(self._state.feedback)}")

    def close(self) -> None:
        if self._game is not None:
            self._game.close()
        if self._own_java is not None:
            self._own_java.close()

    def _refusal(self, command: str) -> str:
        """The game itself knows no commands but these, so it is not asked."""
        return "" if self._spelled(command) else UNKNOWN

    def _spelled(self, command: str) -> str:
        """The command of the list that differs in capitals at most; empty if there is none."""
        return next((one for one in self._state.admissible_commands if one.lower() == command.lower()), "")

    def _shown(self, feedback: str) -> str:
        text = "\n".join(line.strip() for line in feedback.splitlines() if line.strip())
        return _END_OF_SENTENCE.split(text, maxsplit=1)[0] if self._brief else text

    def _is_listed(self, command: str) -> bool:
        return not self._brief or not command.startswith(UNCHANGING)
