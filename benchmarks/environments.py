"""Throughput of an environment with its scripted solution, without a model: alone, and with many episodes at once.

CPU time is that of the environment's processes and of this one. The memory of a waiting episode is its share of the
pages of all processes (Pss), measured when all episodes have started and wait for their first turn.
"""

import argparse
import asyncio
import importlib
import os
import resource
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from figures import make_table, write_figures
from rich.console import Console
from slimrl_tools.environment.check import CLOSE_S, MAX_TURNS, write_data

from slimrl.agent.environment import Environment
from slimrl.agent.isolation.server import EnvironmentServer
from slimrl.data.prompt import Prompt
from slimrl.data.prompts import read_prompts
from slimrl.environments.catalogue import Entry, entry_of
from slimrl.environments.play import Player, play
from slimrl.environments.venvs import venv_python


async def play_all(
    server: EnvironmentServer, entry: Entry, prompts: Sequence[Prompt], episodes: int, at_once: int
) -> tuple[int, int]:
    """Play so many episodes; returns those that earned the full reward, and the turns of all."""
    solver = importlib.import_module(f"{entry.module}.players").Solver
    places = asyncio.Semaphore(at_once)

    async def one(number: int) -> tuple[float, int]:
        prompt = prompts[number % len(prompts)]
        player: Player = solver(prompt, number)
        async with places:
            played = await play(server, prompt, player, seed=number, max_turns=MAX_TURNS)
        return played.total_reward, len(played.turns)

    done = await asyncio.gather(*map(one, range(episodes)))
    return sum(reward >= 1 for reward, _ in done), sum(turns for _, turns in done)


async def waiting_bytes(server: EnvironmentServer, prompts: Sequence[Prompt], count: int) -> float:
    """Memory of each of so many episodes that have started."""
    made: list[Environment] = [server() for _ in range(count)]
    try:
        await asyncio.gather(
            *(one.start(prompts[number % len(prompts)], seed=number, scratch={}) for number, one in enumerate(made))
        )
        children = psutil.Process(os.getpid()).children(recursive=True)
        return sum(process.memory_full_info().pss for process in children) / count
    finally:
        await asyncio.gather(*(one.close() for one in made))


def cpu_s() -> float:
    """CPU time of this process and of all its children that have ended."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def measure(entry: Entry, prompts: Sequence[Prompt], episodes: int, at_once: int) -> dict[str, float]:
    server = EnvironmentServer(venv_python(entry.name), entry.environment, {}, CLOSE_S)
    try:
        asyncio.run(play_all(server, entry, prompts, 1, 1))  # starts the process
        waiting = asyncio.run(waiting_bytes(server, prompts, at_once))
    finally:
        server.close()
    server = EnvironmentServer(venv_python(entry.name), entry.environment, {}, CLOSE_S)
    try:
        asyncio.run(play_all(server, entry, prompts, 1, 1))
        begun, cpu = time.monotonic(), cpu_s()
        solved, turns = asyncio.run(play_all(server, entry, prompts, episodes, at_once))
        seconds = time.monotonic() - begun
    finally:
        server.close()
    return {
        "at_once": at_once,
        "episodes_per_minute": 60 * episodes / seconds,
        "cpu_ms_per_turn": 1000 * (cpu_s() - cpu) / turns,
        "turns_per_episode": turns / episodes,
        "solved_fraction": solved / episodes,
        "waiting_mb": waiting / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", help="environments that are installed")
    parser.add_argument("--episodes", type=int, default=512)
    parser.add_argument("--at-once", type=int, default=256)
    parser.add_argument("--tasks", type=int, default=8, help="different tasks among the episodes")
    parser.add_argument("--json", type=Path, help="write the figures")
    args = parser.parse_args()
    columns = ("environment", "at once", "episodes/min", "CPU-ms/turn", "turns", "solved", "MB waiting")
    table = make_table("Episodes of the scripted solution", columns)
    figures: dict[str, list[dict[str, float]]] = {}
    for name in args.names:
        entry = entry_of(name)
        if not entry.own_process:
            parser.error(f"{name} runs in slimrl's own process, which this benchmark does not measure")
        with tempfile.TemporaryDirectory() as folder:
            write_data(entry, Path(folder), num=args.tasks, heldout=1, seed=0, options=entry.solver_options)
            prompts = read_prompts(Path(folder) / "train.jsonl")
            few = max(1, min(args.episodes, 64))
            figures[name] = [measure(entry, prompts, few, 1), measure(entry, prompts, args.episodes, args.at_once)]
        for row in figures[name]:
            table.add_row(name, *(f"{value:.3g}" for value in row.values()))
    Console().print(table)
    write_figures(args.json, figures)


if __name__ == "__main__":
    main()
