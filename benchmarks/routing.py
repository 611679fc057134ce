"""Sessions of several turns on several engines: which engine serves a request, by prefix and load or by hash.

Real SGLang engines on the toy model. Sessions of a group have one prompt; the lengths of their turns have a heavy tail
that a group's sessions share in part. After each turn a tool answers, after a while. All ways get the same sessions, as
many at a time as a run would start, and each begins with empty caches; they alternate for some rounds.

What the engines computed is read from their own counters, so that it does not depend on who chose them.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from figures import make_table, write_figures
from rich.console import Console
from slimrl_tools.toy.toy import ToySize, write_toy

from slimrl.base.seeds import derive_seed
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.data.engine import Engine, GenerateRequest, GenerateResult
from slimrl.engines.client import SglangEngine
from slimrl.engines.engine_key import new_key
from slimrl.engines.routing import RoutedEngines
from slimrl.engines.servers.process import ServerError
from slimrl.engines.servers.server import EngineServer

KEY = new_key()
"""Key of the engines"""
PROMPT_TOKENS = (64, 256)
TURN_TOKENS, GROUP_SPREAD, TURN_SPREAD, MOST_TOKENS = 12, 0.7, 0.7, 160
"""Median of a turn's new tokens, standard deviations of their logarithm between groups and between turns, and most."""
TOOL_TOKENS, TOOL_S, TOOL_SPREAD = 24, 0.05, 1.0
"""A tool's answer, and the median of its time with the standard deviation of the logarithm."""
VOCABULARY = 300
COUNTERS = {"input": "prompt_tokens_total", "cached": "cached_tokens_total", "new": "generation_tokens_total"}


class HashedEngines(Engine):
    """The hash of a session's id selects its engine."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = list(engines)

    def close(self, session_id: str) -> None:
        for engine in self._engines:
            engine.close(session_id)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        return await self._engines[derive_seed(request.session_id) % len(self._engines)].generate(request)

    async def aclose(self) -> None:
        for engine in self._engines:
            await engine.aclose()


class EndingEngine(SglangEngine):
    """Ends turns where the sessions say, of which the ways know nothing: they see requests for MOST_TOKENS."""

    def __init__(self, url: str, lengths: dict[str, int], **settings: Any) -> None:
        super().__init__(url, key=KEY, **settings)
        self._lengths = lengths

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        return await super().generate(replace(request, max_new_tokens=self._lengths[request.session_id]))


@dataclass(frozen=True, kw_only=True)
class Session:
    name: str
    prompt: list[int]
    turns: list[tuple[int, list[int], float]]
    """New tokens of each turn, the tool's answer to it, and its seconds"""


def made_sessions(groups: int, samples: int, turns: int, seed: int) -> list[Session]:
    """Those of a group stand together."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(3, VOCABULARY) for _ in range(count)]

    made = []
    for group in range(groups):
        prompt, of_group = tokens(rng.randint(*PROMPT_TOKENS)), rng.gauss(0, GROUP_SPREAD)
        for sample in range(samples):
            drawn = []
            for _ in range(rng.randint(1, turns)):
                new = min(MOST_TOKENS, round(TURN_TOKENS * np.exp(of_group + rng.gauss(0, TURN_SPREAD))) + 1)
                drawn.append((new, tokens(TOOL_TOKENS), TOOL_S * rng.lognormvariate(0, TOOL_SPREAD)))
            made.append(Session(name=f"{group:05d}/{sample:03d}", prompt=prompt, turns=drawn))
    return made


Connect = Callable[[dict[str, int]], Engine]
"""Makes the client of all engines, given a place for the length of each session's present turn"""


async def play(engine: Engine, session: Session, lengths: dict[str, int], latencies_s: list[float]) -> None:
    context = list(session.prompt)
    for new_tokens, answer, tool_s in session.turns:
        lengths[session.name] = new_tokens
        start = time.perf_counter()
        result = await engine.generate(
            GenerateRequest(
                session_id=session.name, input_ids=list(context), temperature=1.0, top_p=1.0, top_k=-1,
                max_new_tokens=MOST_TOKENS, stop_token_ids=(), timeout_s=300.0, seed=7,
            )
        )  # fmt: skip
        latencies_s.append(time.perf_counter() - start)
        context += [*result.tokens, *answer]
        await asyncio.sleep(tool_s)
    engine.close(session.name)


async def play_all(connect: Connect, sessions: list[Session], at_once: int) -> dict[str, float]:
    """Requests per second and the latencies of requests."""
    lengths: dict[str, int] = {}
    latencies_s: list[float] = []
    engine, slots = connect(lengths), asyncio.Semaphore(at_once)

    async def one(session: Session) -> None:
        async with slots:
            await play(engine, session, lengths, latencies_s)

    start = time.perf_counter()
    await asyncio.gather(*map(one, sessions))
    seconds = time.perf_counter() - start
    await engine.aclose()
    p50, p99 = np.percentile(latencies_s, [50, 99])
    return {"requests_per_s": len(latencies_s) / seconds, "p50_s": float(p50), "p99_s": float(p99), "seconds": seconds}


def counters(url: str) -> dict[str, float]:
    """Tokens of an engine since its start: of inputs, of those that were cached, and new ones."""
    text = httpx.get(f"{url}/metrics", timeout=60, trust_env=False).raise_for_status().text
    found = dict.fromkeys(COUNTERS, 0.0)
    for line in text.splitlines():
        for key, name in COUNTERS.items():
            if line.startswith(f"sglang:{name}{{"):
                found[key] += float(line.rsplit(" ", 1)[1])
    return found


def one_round(urls: Sequence[str], connect: Connect, sessions: list[Session], at_once: int) -> dict[str, float]:
    """All sessions in one way, from empty caches."""
    for url in urls:
        answer = httpx.post(
            f"{url}/flush_cache", params={"timeout": 30}, headers=KEY.headers, timeout=60, trust_env=False
        )
        answer.raise_for_status()
    before = [counters(url) for url in urls]
    timed = asyncio.run(play_all(connect, sessions, at_once))
    after = [counters(url) for url in urls]
    spent = [{key: now[key] - old[key] for key in COUNTERS} for now, old in zip(after, before, strict=True)]
    computed = [one["input"] - one["cached"] + one["new"] for one in spent]
    total = {key: sum(one[key] for one in spent) for key in COUNTERS}
    return {
        **timed,
        "hit_fraction": total["cached"] / total["input"],
        "balance": max(computed) / statistics.mean(computed),
        "input_tokens": total["input"],
        "new_tokens": total["new"],
    }


@contextmanager
def running_engines(count: int, at_once: int, folder: Path) -> Iterator[list[str]]:
    """Addresses of engines on the toy model."""
    write_toy("qwen3_moe", folder / "toy", ToySize(init_std=0.1), seed=0)
    rollout = RolloutConfig(
        max_trajectory_tokens=1536, max_concurrency_per_engine=at_once, sglang={"enable_metrics": True}
    )
    engines = [
        EngineServer(index, rollout, folder / "toy", folder / f"{index}.log", key=KEY, precision=Precision.fp32)
        for index in range(count)
    ]
    try:
        for engine in engines:
            engine.wait_ready()
        yield [engine.url for engine in engines]
    finally:
        for engine in engines:
            engine.stop()


def ways_of(urls: Sequence[str]) -> dict[str, Connect]:
    return {
        "by prefix and load": lambda lengths: RoutedEngines(partial(EndingEngine, lengths=lengths), urls),
        "by hash": lambda lengths: HashedEngines([EndingEngine(url, lengths) for url in urls]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8, help="sessions of a group")
    parser.add_argument("--turns", type=int, default=4, help="most turns of a session")
    parser.add_argument("--at-once", type=int, default=16, help="sessions per engine at a time")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if min(value for value in vars(options).values() if isinstance(value, int)) < 1:
        print("All sizes: at least 1.", file=sys.stderr)
        return 2
    rounds: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            with running_engines(options.engines, options.at_once, Path(folder)) as urls:
                for repeat in range(options.repeats):
                    sessions = made_sessions(options.groups, options.samples, options.turns, repeat)
                    ways = list(ways_of(urls).items())
                    for name, connect in ways[repeat % len(ways) :] + ways[: repeat % len(ways)]:
                        measured = one_round(urls, connect, sessions, options.at_once * options.engines)
                        rounds.setdefault(name, []).append(measured)
        except (ServerError, httpx.HTTPError) as error:
            print(f"failed: {error!r}", file=sys.stderr)
            return 1
    means = {
        name: {key: statistics.mean(one[key] for one in measured) for key in measured[0]}
        for name, measured in rounds.items()
    }
    columns = ("hit_fraction", "balance", "requests_per_s", "p50_s", "p99_s")
    table = make_table(f"{options.engines} engines", ["", *columns])
    for name, figures in means.items():
        table.add_row(name, *(f"{figures[column]:.3g}" for column in columns))
    Console().print(table)
    sizes = {name: value for name, value in vars(options).items() if name != "json"}
    write_figures(options.json, {"sizes": sizes, "ways": means, "rounds": rounds})
    return 0


if __name__ == "__main__":
    sys.exit(main())
