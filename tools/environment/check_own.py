"""Plays an episode of a class of one's own, through the process and within the deadlines of a run, and shows it."""

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
from slimrl_tools.environment.check import MAX_TURNS, show
from slimrl_tools.exit_codes import CheckFailed

from slimrl.agent.environment import EnvironmentFailure, Observation, Turn
from slimrl.agent.environment_host import EnvironmentHost
from slimrl.agent.isolation.server import EnvironmentServer
from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.agent.tools import ToolBox
from slimrl.config.import_path import resolve
from slimrl.config.schema.agent import AgentConfig, IsolationMode
from slimrl.config.schema.recipe import Recipe
from slimrl.data.prompt import Prompt
from slimrl.data.prompts import read_prompts
from slimrl.environments.play import PlayedEpisode, Player, play
from slimrl.rollout.task.environment import load_environment


class SilentPlayer:
    """Says nothing and calls nothing."""

    def turn(self, observation: Observation) -> Turn:
        return Turn(index=0, text="")


class _OwnPlayer:
    """A player of the user's own, whose errors are named as such.

    Args:
        path: import path of its class.
    """

    def __init__(self, path: str, prompt: Prompt, seed: int) -> None:
        """Raises ValueError: there is no such class, or it is not made with a prompt and a seed."""
        self._path = path
        if ":" not in path:
            raise ValueError(f"--player {path}: the player of a class of your own is MODULE:CLASS")
        try:
            self._player = resolve(path, classes=True)(prompt, seed)
        except TypeError as error:
            raise ValueError(f"--player {path}: cannot be made with the prompt and the seed: {error}") from error

    def turn(self, observation: Observation) -> Turn:
        """Raises CheckFailed."""
        try:
            turn = self._player.turn(observation)
        except Exception as error:
            # The user's own code may raise anything.
            raise CheckFailed(f"{self._path}: turn raised {error!r}") from error
        if not isinstance(turn, Turn):
            raise CheckFailed(f"{self._path}: turn gave {turn!r}, not a Turn")
        return turn


def check_own(path: str, *, prompts: Path, player: str, venv: str, arguments: Mapping[str, Any], seed: int) -> None:
    """Start the class on the first prompt, play it and print what is said.

    Args:
        path: import path of the class.
        player: import path of a class of players, made with the prompt and the seed; empty for one silent turn.
        venv: of the class, as `agent.environment_venv`; empty for this interpreter.
        arguments: of the class.

    Raises:
        ValueError: there is no such class, it refuses the arguments, or the prompts are broken.
        CheckFailed: it raised, was too late, or gave what is no observation.
    """
    prompt = read_prompts(prompts, {})[0]
    scripted: Player = _OwnPlayer(player, prompt, seed) if player else SilentPlayer()
    agent = AgentConfig(
        environment=path,
        environment_args=dict(arguments),
        environment_isolation=IsolationMode.venv if venv else IsolationMode.process,
        environment_venv=venv,
        start_retries=0,
    )
    server = load_environment(Recipe(agent=agent), ToolBox([]), SandboxPool(agent.sandbox))
    assert isinstance(server, EnvironmentServer)

    async def played() -> PlayedEpisode:
        turns = MAX_TURNS if player else 1
        try:
            return await play(
                lambda: EnvironmentHost(server, agent), prompt, scripted, seed=seed, max_turns=turns, on_turn=_checked
            )
        finally:
            await server.aclose()

    begun = time.monotonic()
    try:
        episode = asyncio.run(played())
    except EnvironmentFailure as error:
        raise CheckFailed(str(error)) from error
    seconds = time.monotonic() - begun
    typer.echo(f"\n{path}: return {episode.total_reward:g} in {len(episode.turns)} turns and {seconds:.1f} s")


def _checked(turn: Turn | None, observation: Observation) -> None:
    show(turn, observation)
    if not isinstance(observation.state_id, str | None):
        raise CheckFailed(f"state_id is {observation.state_id!r}, not a text")
