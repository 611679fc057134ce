"""Makes prompts of OpenSpiel's games, and conversations for a small model's cold start."""

import random
from pathlib import Path
from typing import Any

import pyspiel

from slimrl.agent.environment import Message
from slimrl.base.jsonl import write_lines
from slimrl.environments.data_files import prompt_of, write_demonstrations
from slimrl.environments.open_spiel.environment import OpenSpiel
from slimrl.environments.open_spiel.games import load, moves, role_of
from slimrl.environments.open_spiel.opponents import opponent
from slimrl.environments.open_spiel.players import RandomPlayer

PROMPT = "Play the game. Answer with one of the moves."
SELF = "self"
DEEPEST = 200_000
"""Positions that the search for a solution may look at"""


def write(
    out: Path,
    *,
    num: int,
    heldout: int,
    seed: int,
    games: str = "tic_tac_toe",
    opponents: str = SELF,
    heldout_opponents: str = "random",
    demonstrations: int = 0,
) -> None:
    """Write `train.jsonl` and `heldout.jsonl`, whose games and seats take turns; with demonstrations `sft.jsonl`, which
    are games of random moves, and `words.txt`, the words for a toy's tokenizer.

    Args:
        games: separated by semicolons, as OpenSpiel writes them.
        opponents: of the training games: `self`, or those of opponents.py, separated by commas.
        heldout_opponents: of the held-out games.

    Raises:
        ValueError: there is no such game or opponent.
    """
    names = [name.strip() for name in games.split(";")]
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
    name = names[number % len(names)]
    game, kinds = load(name), [one.strip() for one in opponents.split(",")]
    kind = kinds[number // len(names) % len(kinds)]
    metadata: dict[str, Any] = {"game": name, "seed": f"{label}:{number}"}
    if kind != SELF:
        try:
            opponent(kind, game)
        except ValueError as error:
            raise ValueError(f"{error} (or `{SELF}`, the policy itself)") from error
        seat = number // (len(names) * len(kinds)) % game.num_players()
        metadata["opponents"] = {role_of(player): kind for player in range(game.num_players()) if player != seat}
        if kind == "first":
            metadata["solution"] = _solution(game, seat)
    return {"id": f"open_spiel:{label}:{number}", "prompt": PROMPT, "label": None, "metadata": metadata}


def _solution(game: pyspiel.Game, seat: int) -> list[str]:
    """Moves of a seat that win against a player who always takes the first move, by depth-first search.

    Raises:
        ValueError: chance decides, or there are none.
    """
    left = DEEPEST

    def win(state: pyspiel.State) -> list[str] | None:
        nonlocal left
        left -= 1
        if state.is_chance_node() or left < 0:
            said = "it has chance in it, or is too large. Use other opponents, such as random."
            raise ValueError(f"no solution of {game} against the opponent `first` is known: {said}")
        if state.is_terminal():
            return [] if state.returns()[seat] > 0 else None
        if state.current_player() != seat:
            return win(state.child(state.legal_actions()[0]))
        for text, action in moves(state).items():
            if (rest := win(state.child(action))) is not None:
                return [text, *rest]
        return None

    found = win(game.new_initial_state())
    if found is None:
        raise ValueError(f"player {seat} of {game} cannot win against `first`")
    return found


def _demonstrations(line: dict[str, Any], seed: int) -> list[list[Message]]:
    """The conversations of a game in which all moves are drawn."""
    prompt = prompt_of(line)
    environment, player = OpenSpiel(), RandomPlayer(prompt, seed)
    observation = environment.start(prompt, seed=random.Random(seed).randrange(2**31), scratch={})
    by_role: dict[str, list[Message]] = {}
    while not observation.done:
        own = by_role.setdefault(observation.role, [])
        turn = player.turn(observation)
        own += [*observation.messages, {"role": "assistant", "content": turn.text}]
        observation = environment.step(turn)
    return list(by_role.values())
