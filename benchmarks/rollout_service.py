"""Memory, CPU time and event-loop lag of the rollout service with thousands of episodes in flight.

The service, its stage and the episodes are the real ones; the engine is that of made_up_engine.py, and the trainer
takes a batch as soon as there is one. Most of the slots are taken all the time: groups may be many updates ahead.

1. The service fills its slots. Memory is the process's resident memory beyond that before the first episode, at its
   peak, for each episode in flight.
2. The trainer takes its batches. CPU time, of all threads, is that between the first episode and the last batch.
3. The service saves what a checkpoint has of it, with all slots taken.
"""

import argparse
import asyncio
import gc
import multiprocessing
import resource
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import psutil
from figures import make_table, write_figures
from made_up_engine import LABEL, QUESTION, SYSTEM_PROMPT, MadeUpEngine, dialogues_of_policy, turns_of
from rich.console import Console

from slimrl.agent.calculator import calculator
from slimrl.agent.episode import run_turns
from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.agent.tool_environment import ToolEnvironment
from slimrl.agent.tools import ToolBox, make_tool
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.reward import RewardConfig
from slimrl.config.schema.rollout import RolloutMode
from slimrl.data.prompt import Prompt
from slimrl.data.prompts import Sampler
from slimrl.observability.progress import Progress
from slimrl.rewards.loading import load_rewards
from slimrl.rollout.group_ledger import GroupLedger
from slimrl.rollout.loop_lag import PERIOD_S
from slimrl.rollout.prompt_source import PromptSource
from slimrl.rollout.service import RolloutService
from slimrl.rollout.stage import RolloutStage
from slimrl.rollout.task.task import Task

SAMPLES = 8
"""Episodes of a group"""
PROMPTS = [
    Prompt(prompt_id=f"p:{number}", messages=[{"role": "user", "content": QUESTION}], label=LABEL)
    for number in range(1000)
]
DEADLINE_S = 1800.0
"""Deadline of a batch"""
START_S = 2.0
"""Times the factor of the latencies: within it all episodes have begun. The lags of the loop are counted apart."""


def recipe_of(episodes: int, updates: int, turns: int) -> Recipe:
    """A batch is a tenth of the episodes in flight. Enough groups may begin for all slots to be taken to the end."""
    recipe = Recipe(steps=10**6)
    recipe.agent.system_prompt = SYSTEM_PROMPT
    recipe.reward.function = "slimrl.rewards.math:boxed_exact"
    rollout = recipe.rollout
    rollout.mode = RolloutMode.async_
    rollout.max_concurrency_per_engine = episodes
    rollout.prompts_per_step, rollout.samples_per_prompt = max(1, episodes // (10 * SAMPLES)), SAMPLES
    rollout.max_staleness = updates + 20
    rollout.max_turns, rollout.max_trajectory_tokens, rollout.sampling.max_new_tokens = turns, 2**20, 256
    rollout.request_timeout_s = rollout.trajectory_timeout_s = DEADLINE_S
    return recipe


def task_of(recipe: Recipe) -> Task:
    tools = ToolBox([make_tool(calculator)])
    rewards = load_rewards(RewardConfig(function=recipe.reward.function), lambda key, load: load())
    assert rewards is not None
    return Task(
        dialogues=dialogues_of_policy(),
        tools=tools,
        environment=partial(ToolEnvironment, tools, recipe.agent, recipe.rollout.tool_timeout_s),
        roles=(),
        episode_loop=run_turns,
        agent=None,
        summary_rule=None,
        players={},
        search=None,
        subagents={},
        rewards=rewards,
        group_filters=[],
        sandbox=SandboxPool(recipe.agent.sandbox),
        train={"train": PROMPTS},
        eval_sets={},
    )


def stage_of(recipe: Recipe, engine: MadeUpEngine, task: Task) -> RolloutStage:
    return RolloutStage(
        recipe,
        task,
        engine,
        Progress(recipe.steps),
        watch=lambda: None,
        flush_caches=lambda: None,
    )


def measure(episodes: int, updates: int, turns: int, latency: float) -> dict[str, float]:
    """The figures of so many episodes in flight, in this process, which must be a new one."""
    recipe = recipe_of(episodes, updates, turns)
    task = task_of(recipe)
    engine = MadeUpEngine(turns_of(task.dialogues.chat, turns), latency_s=latency)
    deadline = time.monotonic() + DEADLINE_S

    def check() -> None:
        assert time.monotonic() < deadline, "there is no batch"

    with tempfile.TemporaryDirectory() as name, stage_of(recipe, engine, task) as stage:
        folder = Path(name)
        ledger = GroupLedger(folder / "groups.jsonl")
        source = PromptSource(recipe, sampler(), PROMPTS, {})
        service = RolloutService(recipe, source, PROMPTS, stage, lambda group: True, ledger)
        gc.collect()
        rss, cpu_s, start = psutil.Process().memory_info().rss, time.process_time(), time.perf_counter()
        service.start(0, engine.version, None)
        stage.run(asyncio.sleep(max(3 * PERIOD_S, START_S * latency)))
        start_lag_s = max(stage.take_lags())
        for _ in range(updates):
            service.take(check)
            engine.version += 1
            service.advance(engine.version)
        cpu_s, seconds, num_turns = time.process_time() - cpu_s, time.perf_counter() - start, engine.num_turns
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - rss
        lags_s = stage.take_lags()
        start = time.perf_counter()
        service.save(folder / "saved")
        save_s = time.perf_counter() - start
        # The loop's next measurement is of a whole save.
        stage.run(asyncio.sleep(3 * PERIOD_S))
        save_lag_s = max(stage.take_lags())
        service.hold(True)
        saved_bytes = sum(file.stat().st_size for file in (folder / "saved").iterdir())
    return {
        "most_in_flight": engine.most_sessions,
        "turns": num_turns,
        "turns_per_s": num_turns / seconds,
        "cpu_ms_per_turn": cpu_s * 1000 / num_turns,
        "peak_kb_per_episode": peak / 1000 / episodes,
        "start_lag_s": start_lag_s,
        "lag_p50_ms": float(np.percentile(lags_s, 50)) * 1000,
        "lag_p99_ms": float(np.percentile(lags_s, 99)) * 1000,
        "lag_max_ms": max(lags_s) * 1000,
        "save_s": save_s,
        "save_lag_s": save_lag_s,
        "saved_mb": saved_bytes / 1e6,
    }


def sampler() -> Sampler[Prompt]:
    return Sampler(PROMPTS, seed=0, shuffle=False)


def print_table(rows: dict[str, dict[str, float]], title: str) -> None:
    table = make_table(title, ("figure", *rows))
    for figure in next(iter(rows.values())):
        table.add_row(figure, *(f"{row[figure]:.5g}" for row in rows.values()))
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--episodes", type=int, nargs="+", default=[2500, 10000], help="in flight, each size in turn")
    parser.add_argument("--updates", type=int, default=15, help="batches that are taken, of a tenth of the episodes")
    parser.add_argument("--turns", type=int, default=5, help="of an episode")
    parser.add_argument("--latency", type=float, default=10.0, help="factor of the engine's latencies")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    if min(*options.episodes, options.updates) < 1 or options.turns < 2:
        print("--episodes and --updates: at least 1; --turns: at least 2.", file=sys.stderr)
        return 2
    rest = (options.updates, options.turns, options.latency)
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        rows = {str(episodes): pool.apply(measure, (episodes, *rest)) for episodes in options.episodes}
    print_table(rows, "episodes in flight")
    settings = {"updates": options.updates, "turns": options.turns, "latency": options.latency}
    write_figures(options.json, {"episodes": rows, **settings})
    return 0


if __name__ == "__main__":
    sys.exit(main())
