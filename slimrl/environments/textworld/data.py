"""Makes games to train on and held-out ones, and conversations for a small model's cold start.

1. Each seed's game is made, several at a time, and played by its walkthrough; one that this does not win is left out.
2. A game whose content another game has is left out too, so no held-out game is a training game in other words.
3. Demonstrations are played in the training games alone, by players of mixed quality.
"""

import random
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from functools import partial
from itertools import count, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from slimrl.agent.environment import Message
from slimrl.base.jsonl import write_lines
from slimrl.environments.data_files import prompt_of, write_demonstrations
from slimrl.environments.textworld.demonstrations import SKILLS, conversation
from slimrl.environments.textworld.environment import TextWorld
from slimrl.environments.textworld.games import Difficulty, Game, make_game, remove_game
from slimrl.environments.textworld.players import MixedPlayer

PROMPT = "Play the game. Answer with one command."
GAMES = "games"
"""Folder of the games beside the prompt files"""
SEEDS_PER_SEED = 100_000
"""Games of one seed of `write` that can be tried before they are those of the next"""
MAX_SEED = 40_000
"""The generator's seeds have 32 bits."""
MAX_TURNS = 6
"""Longest demonstration"""


def write(
    out: Path,
    *,
    num: int,
    heldout: int,
    seed: int,
    processes: int = 1,
    demonstrations: int = 0,
    rooms: int = 1,
    objects: int = 3,
    min_quest: int = 1,
    quest: int = 3,
    quests: int = 1,
    theme: str = "house",
) -> None:
    """Write `train.jsonl` with `num` games, `heldout.jsonl`, the folder `games`, and with demonstrations `sft.jsonl`
    and `words.txt`, the words for a toy's tokenizer. The same arguments give the same files. Prompts have the games'
    absolute paths.

    Args:
        processes: games that are made at a time.
        demonstrations: conversations with the environment as `brief` shows it.
        rooms: and the others are of `Difficulty`.

    Raises:
        ValueError: an argument has no meaning, or so many different games cannot be made.
    """
    if not 0 <= seed < MAX_SEED:
        raise ValueError(f"seed: {seed} is not between 0 and {MAX_SEED - 1}.")
    difficulty = Difficulty(rooms=rooms, objects=objects, min_quest=min_quest, quest=quest, quests=quests, theme=theme)
    folder = out.absolute() / GAMES
    folder.mkdir(parents=True, exist_ok=True)
    seeds = range(seed * SEEDS_PER_SEED, (seed + 1) * SEEDS_PER_SEED)
    with ProcessPoolExecutor(processes, mp_context=get_context("fork")) as pool:
        games = _distinct(_in_parallel(pool, partial(make_game, folder, difficulty=difficulty), seeds, processes))
        lines = [_prompt_line(game) for game in islice(games, num + heldout)]
        games.close()
        if len(lines) < num + heldout:
            raise ValueError(f"num, heldout: of this difficulty there are but {len(lines)} games with seed {seed}.")
        train = lines[:num]
        write_lines(out / "train.jsonl", train)
        write_lines(out / "heldout.jsonl", lines[num:])
        if demonstrations:
            tasks = zip(random.Random(seed).choices(train, k=demonstrations), count())
            write_demonstrations(out, pool.map(_demonstration, tasks, chunksize=32))


def _in_parallel(
    pool: ProcessPoolExecutor, make: Callable[[int], Game | None], seeds: Iterable[int], at_once: int
) -> Iterator[Game]:
    """The games that could be made, in the order of their seeds; what was made in vain is removed at the end."""
    rest = iter(seeds)
    running = [pool.submit(make, seed) for seed in islice(rest, at_once)]
    try:
        while running:
            game = running.pop(0).result()
            if game is not None:
                yield game
            running += [pool.submit(make, seed) for seed in islice(rest, 1)]
    finally:
        for future in running:
            if not future.cancel() and (game := future.result()) is not None:
                remove_game(game.path)


def _distinct(games: Iterator[Game]) -> Generator[Game, None, None]:
    seen = set()
    for game in games:
        if game.content in seen:
            remove_game(game.path)
        else:
            seen.add(game.content)
            yield game


def _prompt_line(game: Game) -> dict[str, Any]:
    metadata = {"game": str(game.path), "walkthrough": list(game.walkthrough)}
    return {"id": f"textworld:{game.path.stem}", "prompt": PROMPT, "label": None, "metadata": metadata}


def _demonstration(task: tuple[dict[str, Any], int]) -> list[Message]:
    line, seed = task
    prompt = prompt_of(line)
    player = MixedPlayer(prompt, seed, skill=SKILLS[seed % len(SKILLS)])
    with closing(TextWorld(brief=True)) as environment:
        return conversation(environment, prompt, player, MAX_TURNS)
