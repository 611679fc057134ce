"""CPU time of episodes on one event loop, beside bare coroutines that send the same requests.

The engine is that of made_up_engine.py. All else is the real path: chat template, tokenizer, SGLang's parser of calls,
tools, transcript. Each way keeps all its episodes under way at once.

1. The two ways alternate for some rounds. Their CPU time is the process's, the engine's waits included in both.
2. All episodes are held in their first turn, or in their last one, for the memory of a waiting one: in a process of its
   own for each, since freed memory is used again.
"""

import argparse
import asyncio
import gc
import multiprocessing
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import psutil
from figures import make_table, write_figures
from made_up_engine import LABEL, QUESTION, SYSTEM_PROMPT, MadeUpEngine, dialogues_of_policy, turns_of
from rich.console import Console

from slimrl.agent.calculator import calculator
from slimrl.agent.episode_runner import EpisodeRunner
from slimrl.agent.tool_environment import ToolEnvironment
from slimrl.agent.tools import ToolBox, make_tool
from slimrl.config.schema.agent import AgentConfig
from slimrl.config.schema.rollout import RolloutConfig, SamplingConfig
from slimrl.data.engine import Engine, GenerateRequest, GenerateResult
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Status
from slimrl.rollout.garbage import rare_collections

PROMPT = Prompt(prompt_id="p:1", messages=[{"role": "user", "content": QUESTION}], label=LABEL)
SAMPLING = SamplingConfig(max_new_tokens=256)
WAYS = ("episodes", "bare")
GOAL_MS = 0.5
"""CPU time of a turn."""
RunEpisode = Callable[[Engine, int], Awaitable[None]]
"""Runs the episode of this number."""


class Ways:
    """The real episodes, and bare coroutines that send what those sent."""

    def __init__(self, num_turns: int) -> None:
        self._dialogues = dialogues_of_policy()
        self._tools = ToolBox([make_tool(calculator)])
        self._agent = AgentConfig(system_prompt=SYSTEM_PROMPT)
        self._rollout = RolloutConfig(max_turns=num_turns, max_trajectory_tokens=2**20)
        self.turns = turns_of(self._dialogues.chat, num_turns)
        self.requests: list[GenerateRequest] = []
        """Requests of one episode"""

    def run_episode_of(self, name: str, engine: Engine) -> RunEpisode:
        """How a way runs an episode on an engine."""
        return self.bare if name == "bare" else self._real(engine)

    def _real(self, engine: Engine) -> RunEpisode:
        runner = EpisodeRunner(
            engine=engine,
            dialogues=self._dialogues,
            environment=partial(ToolEnvironment, self._tools, self._agent, self._rollout.tool_timeout_s),
            rollout=self._rollout,
            agent=self._agent,
        )

        async def run_episode(engine: Engine, number: int) -> None:
            trajectory = await runner.run(PROMPT, trajectory_id=f"t{number}", sampling=SAMPLING, seed=number)
            assert trajectory.status is Status.completed, trajectory.metadata
            assert trajectory.num_turns == len(self.turns), trajectory.metadata

        return run_episode

    async def record(self) -> None:
        """Note the requests of one episode."""
        engine = MadeUpEngine(self.turns, latency_s=0)
        generate = engine.generate

        async def noted(request: GenerateRequest) -> GenerateResult:
            self.requests.append(request)
            return await generate(request)

        engine.generate = noted  # type: ignore[method-assign]
        await self._real(engine)(engine, 0)

    async def bare(self, engine: Engine, number: int) -> None:
        for request in self.requests:
            await engine.generate(
                GenerateRequest(
                    **{**vars(request), "session_id": f"t{number}", "input_ids": list(request.input_ids)},
                )
            )


async def run(run_episode: RunEpisode, engine: Engine, num_episodes: int) -> dict[str, float]:
    """CPU seconds and seconds of all episodes."""
    cpu, start = time.process_time(), time.perf_counter()
    await asyncio.gather(*(run_episode(engine, number) for number in range(num_episodes)))
    return {"cpu_s": time.process_time() - cpu, "seconds": time.perf_counter() - start}


async def waiting_bytes(name: str, num_episodes: int, num_turns: int, turn: int) -> float:
    """Resident memory of an episode that waits in a turn, in this process, which must be a new one."""
    ways = Ways(num_turns)
    await ways.record()
    engine = MadeUpEngine(ways.turns, latency_s=0, held_turn=turn)
    run_episode = ways.run_episode_of(name, engine)
    gc.collect()
    before = psutil.Process().memory_info().rss
    episodes = asyncio.gather(*(run_episode(engine, number) for number in range(num_episodes)))
    while engine.num_held < num_episodes:
        await asyncio.sleep(0.1)
        assert not episodes.done()
    gc.collect()
    after = psutil.Process().memory_info().rss
    engine.release.set()
    await episodes
    return (after - before) / num_episodes


def waiting_bytes_of(name: str, num_episodes: int, num_turns: int, turn: int) -> float:
    return asyncio.run(waiting_bytes(name, num_episodes, num_turns, turn))


async def compare(num_episodes: int, num_turns: int, repeats: int, latency_s: float) -> dict[str, dict[str, float]]:
    """Way -> milliseconds of CPU for each turn, and seconds of a round."""
    ways = Ways(num_turns)
    await ways.record()
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in WAYS}
    for _ in range(repeats):
        for name, measured in rounds.items():
            engine = MadeUpEngine(ways.turns, latency_s=latency_s)
            measured.append(await run(ways.run_episode_of(name, engine), engine, num_episodes))
    return {
        name: {
            "cpu_ms_per_turn": _median(measured, "cpu_s") * 1000 / (num_episodes * num_turns),
            "seconds": _median(measured, "seconds"),
        }
        for name, measured in rounds.items()
    }


def measure_memory(num_episodes: int, num_turns: int) -> dict[str, dict[str, float]]:
    """Way -> bytes of an episode that waits in its first turn and in its last one."""
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        return {
            name: {
                key: pool.apply(waiting_bytes_of, (name, num_episodes, num_turns, turn))
                for key, turn in (("first_turn_bytes", 0), ("last_turn_bytes", num_turns - 1))
            }
            for name in WAYS
        }


def _median(rounds: Sequence[dict[str, float]], key: str) -> float:
    return statistics.median(each[key] for each in rounds)


def print_table(figures: dict[str, dict[str, float]], title: str) -> None:
    table = make_table(title, ("way", "CPU ms/turn", "seconds", "kB waiting, first turn", "last turn"))
    for name, row in figures.items():
        table.add_row(
            name,
            f"{row['cpu_ms_per_turn']:.3f}",
            f"{row['seconds']:.1f}",
            f"{row['first_turn_bytes'] / 1000:.1f}",
            f"{row['last_turn_bytes'] / 1000:.1f}",
        )
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--episodes", type=int, default=5000, help="at the same time")
    parser.add_argument("--turns", type=int, default=10, help="of an episode")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of each way")
    parser.add_argument("--latency", type=float, default=1.0, help="factor of the engine's latencies")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    if options.episodes < 1 or options.turns < 2 or options.repeats < 1:
        print("--episodes and --repeats: at least 1; --turns: at least 2.", file=sys.stderr)
        return 2
    memory = measure_memory(options.episodes, options.turns)
    with rare_collections():
        times = asyncio.run(compare(options.episodes, options.turns, options.repeats, options.latency))
    ways = {name: {**times[name], **memory[name]} for name in WAYS}
    print_table(ways, f"{options.episodes} episodes of {options.turns} turns at a time; the goal is {GOAL_MS} ms")
    ours, bare = ways["episodes"]["cpu_ms_per_turn"], ways["bare"]["cpu_ms_per_turn"]
    figures = {"episodes": options.episodes, "turns": options.turns, "ways": ways, "goal_ms": GOAL_MS}
    write_figures(options.json, {**figures, "ratio": ours / bare, "difference_ms": ours - bare})
    return 0


if __name__ == "__main__":
    sys.exit(main())
