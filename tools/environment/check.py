"""Plays an episode of an environment by its scripted player, and shows it."""

import asyncio
import importlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import typer
from slimrl_tools.exit_codes import CheckFailed

from slimrl.agent.environment import EnvironmentFailure, MakeEnvironment, Observation, Turn
from slimrl.agent.isolation.interpreter import call_elsewhere
from slimrl.agent.isolation.server import EnvironmentServer
from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.agent.tool_call import ToolCall
from slimrl.base.visible import visible
from slimrl.config.import_path import resolve
from slimrl.config.schema.agent import SandboxBackend, SandboxConfig
from slimrl.data.prompts import read_prompts
from slimrl.environments.catalogue import CONTAINER_COMMANDS, Entry
from slimrl.environments.play import PlayedEpisode, play
from slimrl.environments.venvs import venv_python

DATA_S = 3600.0
CLOSE_S = 30.0
CONTAINER_S = 60.0
PLAYERS = {"solver": "Solver", "random": "RandomPlayer"}
MAX_TURNS = 60
SHOWN_CHARACTERS = 1500


def write_data(entry: Entry, out: Path, *, num: int, heldout: int, seed: int, options: Mapping[str, Any]) -> None:
    """Write the prompt files of an environment into a new folder; raises ValueError as
    `slimrl.environments.write_data` does."""
    if out.is_dir() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty. Remove it, or choose another folder.")
    arguments = {
        "module": f"{entry.module}.data",
        "out": str(out.absolute()),
        "num": num,
        "heldout": heldout,
        "seed": seed,
        "options": dict(options),
    }
    call_elsewhere(venv_python(entry.name), "slimrl.environments.write_data:write", arguments, DATA_S)


def check(entry: Entry, *, player: str, seed: int, options: Mapping[str, Any]) -> None:
    """Make one task, play it and print what is said.

    Raises:
        ValueError: it is not installed.
        CheckFailed: the environment failed, or the solver did not earn the full reward.
    """
    if player not in PLAYERS:
        raise ValueError(f"--player {player}: one of {', '.join(PLAYERS)}")
    with tempfile.TemporaryDirectory(prefix="slimrl-check-") as folder:
        begun = time.monotonic()
        write_data(
            entry,
            Path(folder),
            num=1,
            heldout=1,
            seed=seed,
            options={**entry.check_options, **(entry.solver_options if player == "solver" else {}), **options},
        )
        made_s = time.monotonic() - begun
        prompt = read_prompts(Path(folder) / "train.jsonl", {})[0]
        scripted = getattr(importlib.import_module(f"{entry.module}.players"), PLAYERS[player])(prompt, seed)
        begun = time.monotonic()
        try:
            play_it = partial(play, prompt=prompt, player=scripted, seed=seed, max_turns=MAX_TURNS, on_turn=show)
            episode = asyncio.run(_played(entry, Path(folder), play_it))
        except EnvironmentFailure as error:
            raise CheckFailed(str(error)) from error
    typer.echo(
        f"\n{entry.name}: return {episode.total_reward:g} in {len(episode.turns)} turns and "
        f"{time.monotonic() - begun:.1f} s; the data took {made_s:.1f} s"
    )
    if player == "solver" and episode.total_reward < 1:
        raise CheckFailed("the scripted solution did not earn the full reward, 1")


async def _played(
    entry: Entry, folder: Path, play_it: Callable[[MakeEnvironment], Awaitable[PlayedEpisode]]
) -> PlayedEpisode:
    """
    Args:
        folder: of the data.
    """
    if entry.own_process:
        server = EnvironmentServer(venv_python(entry.name), entry.environment, {}, CLOSE_S)
        try:
            return await play_it(server)
        finally:
            await server.aclose()
    sandbox = SandboxPool(_sandbox_config(entry))
    make = partial(resolve(entry.environment, classes=True), sandbox, folder=str(folder))
    try:
        return await play_it(make)
    finally:
        await sandbox.close()


def _sandbox_config(entry: Entry) -> SandboxConfig:
    """Raises CheckFailed: there are no containers here."""
    if not entry.containers:
        return SandboxConfig(packages=["pytest"])
    for command in filter(shutil.which, CONTAINER_COMMANDS):
        done = subprocess.run([command, "info"], capture_output=True, timeout=CONTAINER_S, check=False)
        if done.returncode == 0:
            return SandboxConfig(backend=SandboxBackend.container, command=command)
    raise CheckFailed(f"neither `{'` nor `'.join(f'{command} info' for command in CONTAINER_COMMANDS)}` succeeds here")


def show(turn: Turn | None, observation: Observation) -> None:
    """Print a turn and what it led to."""
    if turn is not None:
        calls = [f"{call.name}({call.arguments})" for call in turn.calls if isinstance(call, ToolCall)]
        typer.echo(visible("> " + " ".join(filter(None, [turn.text, *calls]))))
    to = f" to {observation.role}" if observation.role else ""
    for message in observation.messages:
        typer.echo(visible(f"{message['role']}{to}: {str(message['content'])[:SHOWN_CHARACTERS]}"))
    paid = [f"reward {observation.reward:g}"] if observation.reward is not None else []
    paid += [f"{role} gets {reward:g}" for role, reward in observation.role_rewards.items()]
    if paid or observation.done:
        typer.echo(visible(f"  {', '.join([*paid, *(['the episode is over'] if observation.done else [])])}"))
