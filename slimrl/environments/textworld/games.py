"""Makes one game: TextWorld's generator draws it, Inform 7 compiles it, and its own walkthrough must win it."""

import contextlib
import hashlib
from dataclasses import dataclass
from pathlib import Path

import textworld

THEMES = ("house", "basic")


@dataclass(frozen=True, kw_only=True)
class Difficulty:
    """
    Raises:
        ValueError: a number that is too small, or an unknown theme.
    """

    rooms: int
    objects: int
    min_quest: int
    """Commands that a quest needs at least"""
    quest: int
    """Commands that a quest needs at most"""
    quests: int
    """Quests of a game, each of which is a point of its score"""
    theme: str
    """`house`: things of a house, and instructions in many words. `basic`: `thing5`, `box23`, plain instructions."""

    def __post_init__(self) -> None:
        for name in ("rooms", "objects", "min_quest", "quests"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is less than 1.")
        if self.quest < self.min_quest:
            raise ValueError(f"quest: {self.quest} is less than min_quest, {self.min_quest}.")
        if self.theme not in THEMES:
            raise ValueError(f"theme: {self.theme!r} is none of {', '.join(THEMES)}.")

    def length(self, seed: int) -> int:
        """Commands of the quests of a seed's game: all lengths occur equally often."""
        return self.min_quest + seed % (self.quest - self.min_quest + 1)


@dataclass(frozen=True, kw_only=True)
class Game:
    path: Path
    """The `.z8` file; the `.json` file beside it belongs to it."""
    walkthrough: tuple[str, ...]
    """Commands that win the game"""
    content: str
    """Digest of what is where at the start and of the walkthrough: equal for games that differ in wording alone"""


def make_game(folder: Path, seed: int, difficulty: Difficulty) -> Game | None:
    """Make the game of a seed; None if its walkthrough does not win it with the full score.

    Takes one to several seconds of CPU, nearly all of them in Inform 7.
    """
    options = textworld.GameOptions()
    options.seeds = seed
    options.nb_rooms, options.nb_objects = difficulty.rooms, difficulty.objects
    options.nb_parallel_quests, options.quest_length = difficulty.quests, difficulty.length(seed)
    options.grammar.theme = difficulty.theme
    options.path = str(folder / f"{seed}.z8")
    file, game = textworld.make(options)
    path = Path(file)
    path.with_suffix(".ni").unlink()
    walkthrough = tuple(game.metadata["walkthrough"])
    played = textworld.start(file, textworld.EnvInfos(facts=True, admissible_commands=True, score=True, max_score=True))
    with contextlib.closing(played):
        state = played.reset()
        facts = sorted(map(str, state.facts))
        for command in walkthrough:
            state, _, _ = played.step(command)
        if not (state.won and state.score == state.max_score):
            remove_game(path)
            return None
    content = hashlib.sha256("\n".join([*facts, *walkthrough]).encode()).hexdigest()
    return Game(path=path, walkthrough=walkthrough, content=content)


def remove_game(path: Path) -> None:
    """Delete the two files of a game."""
    path.unlink()
    path.with_suffix(".json").unlink()
