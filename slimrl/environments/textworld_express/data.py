"""Draws games to train on and held-out ones, and makes conversations for a small model's cold start.

1. Seeds are drawn from the package's own folds, whose games have different things in them.
2. Each game is solved by the package's agent; one that is not, or whose start and solution another has, is left out.
3. Demonstrations are played in the training games alone, by players of mixed quality.
"""

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any

from textworld_express.constants import GAME_NAMES

from slimrl.agent.environment import Message
from slimrl.base.jsonl import write_lines
from slimrl.environments.data_files import prompt_of, write_demonstrations
from slimrl.environments.textworld.demonstrations import SKILLS, conversation
from slimrl.environments.textworld.players import MixedPlayer
from slimrl.environments.textworld_express.environment import TextWorldExpress
from slimrl.environments.textworld_express.java import Java
from slimrl.environments.textworld_express.walkthrough import find_walkthrough

PROMPT = "Play the game. Answer with one command."
FOLDS = {"train": range(0, 1000), "dev": range(10_000, 11_000), "test": range(20_000, 21_000)}
"""Seeds of each fold, as the package has them"""
MAX_TURNS = 6
"""Longest demonstration"""


def write(
    out: Path,
    *,
    num: int,
    heldout: int,
    seed: int,
    game: str = "",
    params: str = "",
    heldout_fold: str = "dev",
    demonstrations: int = 0,
) -> None:
    """Write `train.jsonl` with `num` games of the package's training fold, `heldout.jsonl`, and with demonstrations
    `sft.jsonl` and `words.txt`, the words for a toy's tokenizer. The same arguments give the same files.

    Args:
        game: kinds of games, separated by commas, which take turns; all of them if it is empty.
        params: of the games of one kind, such as `numLocations=5,includeDoors=0`; the package's own if it is empty.
        heldout_fold: `dev` or `test`.
        demonstrations: conversations with the environment as `brief` shows it.

    Raises:
        ValueError: an argument has no meaning, or there are not so many different games.
    """
    kinds = game.split(",") if game else GAME_NAMES
    if unknown := [kind for kind in kinds if kind not in GAME_NAMES]:
        raise ValueError(f"game: {', '.join(unknown)}; there are {', '.join(GAME_NAMES)}.")
    if params and len(kinds) > 1:
        raise ValueError("params: each kind of game has its own. Name one by game, or leave params out.")
    if heldout_fold not in ("dev", "test"):
        raise ValueError(f"heldout_fold: {heldout_fold!r} is neither dev nor test.")
    TextWorldExpress.share()
    java = TextWorldExpress.java()
    try:
        seen: set[str] = set()
        train = _lines(java, "train", num, seed, kinds, params, seen)
        held_out = _lines(java, heldout_fold, heldout, seed, kinds, params, seen)
        write_lines(out / "train.jsonl", train)
        write_lines(out / "heldout.jsonl", held_out)
        if demonstrations:
            tasks = zip(random.Random(seed).choices(train, k=demonstrations), count())
            write_demonstrations(out, (_demonstration(line, number) for line, number in tasks))
    finally:
        java.close()


def _lines(
    java: Java, fold: str, num: int, seed: int, kinds: Sequence[str], params: str, seen: set[str]
) -> list[dict[str, Any]]:
    """Prompt lines of so many games.

    Args:
        seen: contents of games that are not drawn again; those that are drawn are added.
    """
    drawn = {kind: _games(java, kind, params, fold, seed, seen) for kind in kinds}
    return [next(drawn[kind]) for kind in islice(cycle(kinds), num)]


def _games(java: Java, kind: str, params: str, fold: str, seed: int, seen: set[str]) -> Iterator[dict[str, Any]]:
    """Prompt lines of different games of a kind, in an order that the seed gives.

    Raises:
        ValueError: the fold has no more.
    """
    found = 0
    for of_game in random.Random(f"{seed}:{fold}:{kind}").sample(FOLDS[fold], len(FOLDS[fold])):
        walkthrough = find_walkthrough(java, kind, params, of_game, fold)
        if not walkthrough:
            continue
        metadata = {"game": kind, "params": params, "fold": fold, "seed": of_game, "walkthrough": walkthrough}
        name = f"textworld_express:{kind}:{fold}:{of_game}"
        line = {"id": name, "prompt": PROMPT, "label": None, "metadata": metadata}
        content = _content(line)
        if content not in seen:
            seen.add(content)
            found += 1
            yield line
    raise ValueError(
        f"num, heldout: with params {params!r}, the fold {fold} of {kind} has but {found} different games."
    )


def _content(line: dict[str, Any]) -> str:
    """Digest of what is where at the start, the task and the walkthrough."""
    with closing(TextWorldExpress()) as environment:
        first = environment.start(prompt_of(line), seed=0, scratch={})
    said = [str(first.state_id), str(first.messages[-1]["content"]), *line["metadata"]["walkthrough"]]
    return hashlib.sha256("\n".join(said).encode()).hexdigest()


def _demonstration(line: dict[str, Any], number: int) -> list[Message]:
    prompt = prompt_of(line)
    player = MixedPlayer(prompt, number, skill=SKILLS[number % len(SKILLS)])
    with closing(TextWorldExpress(brief=True)) as environment:
        return conversation(environment, prompt, player, MAX_TURNS)
