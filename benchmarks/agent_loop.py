"""Sampled tokens in a second through the agent loop, beside what the same engines give to bare batches.

The work is that of step.py. By turns the rollout stage of `slimrl train` samples it (chat template, episodes, routing,
log-probs, rewards, trajectories), and each engine is sent its half of the same token ids in one request. The prefix
caches are flushed before both.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import httpx
from figures import make_table, write_figures
from rich.console import Console
from step import NEW_TOKENS, PROMPTS, RECIPE, SAMPLES, overrides, write_work

from slimrl.base.errors import RunError
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.data.trajectory import Trajectory
from slimrl.engines.engine_key import EngineKey
from slimrl.observability.progress import Progress
from slimrl.rollout.task.task import load_task
from slimrl.runtime.cluster.processes import Processes
from slimrl.runtime.start import logs_of_command, prepare, rollout_stage, started

WAYS = ("agent loop", "bare")
GOAL = 0.85
"""The loop's tokens over those of bare batches"""


def measure(repeats: int, extra: Sequence[str]) -> list[dict[str, float]]:
    """Seconds of both ways in each round after the first, which warms up."""
    with tempfile.TemporaryDirectory() as name, Progress(1) as progress:
        folder = Path(name)
        checkpoint, prompts_file = write_work(folder, None, None)
        settings = [*overrides(checkpoint, prompts_file, folder, repeats), *extra]
        read = partial(load_task, train=True, evaluate=False)
        loaded, task = prepare(RECIPE, settings, "rollout", progress, read)
        recipe, prompts = loaded.recipe, list(chain(*task.train.values()))
        run = logs_of_command(recipe.run.dir, "rollout", loaded)
        rounds = []
        with started(recipe, run, progress, with_engines=True) as processes:
            engines = processes.engines
            assert engines is not None
            urls = [address.url for address in engines.addresses]
            with rollout_stage(loaded, task, Processes(engines=engines, trainers=None), progress) as stage:
                for number in range(repeats + 1):
                    engines.flush_caches()
                    begin = time.perf_counter()
                    trajectories = stage.rollout(prompts, label=f"step_{number:06d}")
                    loop_s = time.perf_counter() - begin
                    engines.flush_caches()
                    bare_s = asyncio.run(_bare(urls, engines.key, trajectories, recipe.rollout))
                    rounds.append({"agent loop": loop_s, "bare": bare_s})
    return rounds[1:]


async def _bare(
    urls: Sequence[str], key: EngineKey, trajectories: Sequence[Trajectory], rollout: RolloutConfig
) -> float:
    """Seconds until every engine has answered its part, in one request each."""
    sampling = rollout.sampling
    parameters = {"max_new_tokens": NEW_TOKENS, "temperature": sampling.temperature, "ignore_eos": True}
    [segments] = zip(*(trajectory.segments for trajectory in trajectories), strict=True)
    if any(int(segment.loss_mask.sum()) != NEW_TOKENS for segment in segments):
        raise RunError(f"a trajectory has not {NEW_TOKENS} sampled tokens; the work is not fixed")
    inputs = [segment.tokens[~segment.loss_mask].tolist() for segment in segments]
    share = len(inputs) // len(urls)
    bodies = [
        {"input_ids": inputs[share * n : share * (n + 1)], "sampling_params": parameters, "return_logprob": True}
        for n in range(len(urls))
    ]
    async with httpx.AsyncClient(headers=key.headers, timeout=rollout.request_timeout_s, trust_env=False) as client:
        begin = time.perf_counter()
        answers = await asyncio.gather(
            *(client.post(f"{url}/generate", json=body) for url, body in zip(urls, bodies, strict=True))
        )
        seconds = time.perf_counter() - begin
    for answer in answers:
        answer.raise_for_status()
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings laid over the recipe")
    parser.add_argument("--repeats", type=int, default=10, help="counted rounds")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    try:
        rounds = measure(options.repeats, options.overrides)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except RunError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    tokens = PROMPTS * SAMPLES * NEW_TOKENS
    rates = {way: tokens / statistics.median(seconds[way] for seconds in rounds) for way in WAYS}
    ratio = statistics.median(seconds["bare"] / seconds["agent loop"] for seconds in rounds)
    table = make_table(f"{tokens} tokens, {len(rounds)} rounds", ("way", "tokens/s"))
    for way in WAYS:
        table.add_row(way, f"{rates[way]:.0f}")
    console = Console()
    console.print(table)
    console.print(f"the agent loop reaches {ratio:.2f} of bare batches (goal: {GOAL})")
    write_figures(options.json, {"tokens_per_s": rates, "ratio": ratio, "goal": GOAL, "rounds": rounds})
    return 0


if __name__ == "__main__":
    sys.exit(main())
