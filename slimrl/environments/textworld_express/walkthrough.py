"""What solves a game: the path of the package's own agent for its kind."""

from slimrl.environments.textworld_express.game import Game
from slimrl.environments.textworld_express.java import Java

ATTEMPTS = 10
"""Agents walk at random until they see what they look for, and may give up."""
_WANDERING = ("move ", "look around", "task")
"""Starts of the commands that a detour consists of"""


def find_walkthrough(java: Java, name: str, params: str, seed: int, fold: str) -> list[str]:
    """Commands that win a game with the full score, without walks in a circle; none if the package's agent finds none.

    The agents have a random generator that the package does not seed, so they are called here with one that is.

    Raises:
        ValueError: as `Game` does.
    """
    for attempt in range(ATTEMPTS):
        game = Game(java.connect(), name, params, seed, fold)
        try:
            jvm = game.gateway.jvm
            kind = game.java_game.getClass().getSimpleName().removesuffix("Game")
            agent = getattr(jvm.textworldexpress.goldagent, f"{kind}GoldAgent")(game.java_game)
            found = agent.mkGoldPath(jvm.scala.util.Random(attempt))
            path = list(found._2()) if found._1() else []
            for held in (agent, found):
                game.gateway.detach(held)
        finally:
            game.close()
        if path and (straight := _without_detours(java, path, name, params, seed, fold)):
            return straight
    return []


def _without_detours(java: Java, path: list[str], name: str, params: str, seed: int, fold: str) -> list[str]:
    """The path without what leads back to where it began, and what comes after the end; none if it does not win."""
    game = Game(java.connect(), name, params, seed, fold)
    kept: list[str] = []
    facts = [set(game.state.facts)]
    """After each command that was kept, from the start on"""
    try:
        state = game.state
        for command in path:
            if command not in state.admissible_commands:  # such as the empty one that some agents begin with
                continue
            state, score, done = game.step(command)
            kept.append(command)
            facts.append(set(state.facts))
            if done:
                return kept if state.won and score == 1 else []
            begun = facts.index(facts[-1])
            if all(one.startswith(_WANDERING) for one in kept[begun:]):
                del kept[begun:], facts[begun + 1 :]
        return []
    finally:
        game.close()
