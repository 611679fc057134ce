"""Makes prompts of TextArena's games, and conversations for a small model's cold start."""

import random
from pathlib import Path
from typing import Any

from slimrl.agent.environment import Message, Turn
from slimrl.base.jsonl import write_lines
from slimrl.environments.data_files import prompt_of, write_demonstrations
from slimrl.environments.textarena.environment import TextArena
from slimrl.environments.textarena.games import refuse_unknown
from slimrl.environments.textarena.opponents import legal_moves, opponent, random_move

PROMPT = "Play the game."
SELF, PLAYER = "self", "player:"
DEEPEST = 5_000
"""Positions that the search for a solution may look at"""


def write(
    out: Path,
    *,
    num: int,
    heldout: int,
    seed: int,
    games: str = "TicTacToe-v0",
    opponents: str = SELF,
    heldout_opponents: str = "random",
    demonstrations: int = 0,
) -> None:
    """Write `train.jsonl` and `heldout.jsonl`, whose games and seats take turns; with demonstrations `sft.jsonl`, which
    are games of random moves, and `words.txt`, the words for a toy's tokenizer.

    Args:
        games: TextArena's ids, separated by commas.
        opponents: of the training games, separated by commas: `self`, those of opponents.py, or `player:NAME`, a player
            of the recipe's `agent.players`.
        heldout_opponents: of the held-out games.

    Raises:
        ValueError: there is no such game or opponent.
    """
    names = [name.strip() for name in games.split(",")]
    for name in names:
        refuse_unknown(name)
    train = [_line(number, f"{seed}:train", names, opponents) for number in range(num)]
    write_lines(out / "train.jsonl", train)
    write_lines(
        out / "heldout.jsonl", [_line(number, f"{seed}:heldout", names, heldout_opponents) for number in range(heldout)]
    )
    if demonstrations:
        write_demonstrations(
            out,
            (
                conversation
                for number in range(demonstrations)
                for conversation in _demonstrations(train[number % len(train)], seed * demonstrations + number)
            ),
        )


def _line(number: int, label: str, names: list[str], opponents: str) -> dict[str, Any]:
    name, kinds = names[number % len(names)], [one.strip() for one in opponents.split(",")]
    kind = kinds[number // len(names) % len(kinds)]
    identifier = f"textarena:{label}:{number}"
    metadata: dict[str, Any] = {"game": name, "seed": random.Random(identifier).randrange(2**31)}
    line = {"id": identifier, "prompt": PROMPT, "label": None, "metadata": metadata}
    other = TextArena.ROLES[1 - number // (len(names) * len(kinds)) % len(TextArena.ROLES)]
    if kind.startswith(PLAYER):
        metadata["players"] = {other: kind.removeprefix(PLAYER)}
    elif kind != SELF:
        try:
            opponent(kind, name)
        except ValueError as error:
            raise ValueError(f"{error} (or `{SELF}`, the policy itself, or `{PLAYER}NAME`)") from error
        metadata["opponents"] = {other: kind}
        if kind == "first":
            metadata["solution"] = _solution(line)
    return line


def _solution(line: dict[str, Any]) -> list[str]:
    """Moves that win against a player who always takes the first move, by depth-first search.

    Raises:
        ValueError: there are none, or they were not found soon.
    """
    left = DEEPEST

    def win(environment: TextArena) -> list[str] | None:
        nonlocal left
        for text in legal_moves(environment.game):
            left -= 1
            if left < 0:
                raise ValueError(f"no solution of {line['metadata']['game']} against the opponent `first` is known")
            after = environment.copy(scratch={})
            observation = after.step(Turn(index=0, text=text))
            if observation.done:
                if observation.reward == 1:
                    return [text]
            elif (rest := win(after)) is not None:
                return [text, *rest]
        return None

    environment = TextArena()
    environment.start(prompt_of(line), seed=0, scratch={})
    found = win(environment)
    if found is None:
        raise ValueError(f"{line['id']}: {line['metadata']['game']} cannot be won against `first`")
    return found


def _demonstrations(line: dict[str, Any], seed: int) -> list[list[Message]]:
    """The conversations of a game in which all moves are drawn."""
    environment, chance = TextArena(), random.Random(seed)
    observation = environment.start(prompt_of(line), seed=seed, scratch={})
    by_role: dict[str, list[Message]] = {}
    while not observation.done:
        own = by_role.setdefault(observation.role, [])
        text = random_move(environment.game, chance)
        own += [*observation.messages, {"role": "assistant", "content": text}]
        observation = environment.step(Turn(index=len(own), text=text))
    return list(by_role.values())
