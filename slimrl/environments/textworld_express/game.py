"""One game in the Java machine: its commands, its score, and what is where in it."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from py4j.java_gateway import JavaGateway, JavaObject
from py4j.protocol import Py4JJavaError

WITH_ROOMS = ("cookingworld", "twc", "coin", "mapreader")
"""Games that give all their rooms. The others have one room or none, and all that changes there is in their text."""
_PARAMETERS = re.compile(r"(\w+=\d+(,\w+=\d+)*)?")


@dataclass(frozen=True, kw_only=True)
class GameState:
    """What TextGame reads of a game."""

    admissible_commands: tuple[str, ...]
    feedback: str
    facts: tuple[str, ...]
    won: bool


class Game:
    """A game at its start.

    Args:
        gateway: of this game alone; `close` closes it.
        name: of the kind of game, such as `coin`.
        params: of the kind, such as `numLocations=5,includeDoors=0`; what is not said is as the package has it.
        seed: of the game.
        fold: `train`, `dev` or `test`. Games of different folds have different things in them.

    Raises:
        ValueError: there is no such kind or parameter, or no game with these parameters.
    """

    def __init__(self, gateway: JavaGateway, name: str, params: str, seed: int, fold: str) -> None:
        if _PARAMETERS.fullmatch(params) is None:
            raise ValueError(f"params: {params!r} is not like numLocations=5,includeDoors=0")
        self.gateway = gateway
        self._interface = gateway.jvm.textworldexpress.runtime.PythonInterface()
        self._objects: list[JavaObject] = [self._interface]
        try:
            if refused := self._interface.load(name, params):
                raise ValueError(f"{name} with {params!r}: {refused.strip()}")
            answer = json.loads(self._interface.generateNewGameJSON(seed, fold, False))
        except Py4JJavaError as error:
            raise ValueError(f"{name} with {params!r}: {error.java_exception.getMessage()}") from error
        self.java_game = self._interface.game()
        self._rooms = list(self.java_game.locations()) if name in WITH_ROOMS else []
        self._objects += [self.java_game, *self._rooms]
        self.task: str = self._interface.getTaskDescription()
        self.state = self._state(answer)

    def step(self, command: str) -> tuple[GameState, float, bool]:
        """The state after a command of the list, the score, and whether the game is over. The score is a share of the
        highest one; a game that was lost has none."""
        answer = json.loads(self._interface.stepJSON(command))
        return self._state(answer), max(answer["score"], 0.0), answer["tasksuccess"] or answer["taskfailure"]

    def close(self) -> None:
        """Free its memory and close the connection."""
        for held in self._objects:
            self.gateway.detach(held)
        self.gateway.close()

    def _state(self, answer: Mapping[str, Any]) -> GameState:
        look = answer["look"]
        rooms = [_in_any_order(room.toJSON()) for room in self._rooms] or [look]
        carried = [f"carried: {line.strip()}" for line in answer["inventory"].splitlines()]
        return GameState(
            admissible_commands=tuple(sorted(answer["validActions"])),
            feedback=answer["observation"],
            facts=(look.partition(".")[0], *rooms, *carried, *answer["validActions"]),
            won=answer["tasksuccess"],
        )


def _in_any_order(text: str) -> str:
    """The same for all orders in which JSON may list the things of a room."""
    return str(json.loads(text, object_pairs_hook=lambda pairs: sorted(pairs, key=str)))
