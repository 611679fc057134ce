"""A real engine whose KV cache is too small for its trajectories: how often it retracts, with and without adapting."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest
from engine_probes import KEY
from fleet import Fleet
from slimrl_tools.toy.toy import ToySize, write_toy

from slimrl import device
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.data.engine import GenerateRequest
from slimrl.engines.client import SglangEngine
from slimrl.rollout import pressure
from slimrl.rollout.pressure import CachePressure

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(400),
    pytest.mark.skipif(device.device_type() == "cuda", reason="the size of the cache is that of a CPU engine"),
]

CACHE_TOKENS, NEW_TOKENS, TRAJECTORIES = 3000, 250, 120
ROLLOUT = RolloutConfig(
    max_trajectory_tokens=512,
    max_concurrency_per_engine=48,
    startup_timeout_s=200,
    sglang={"max_total_tokens": CACHE_TOKENS},
    # SGLang keeps room for what running requests may still sample, less of it with each step after a retraction, down
    # to a tenth after 600 steps: of long turns that is soon, and of these ones after as small a part.
    env={"SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS": "10"},
)


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    model: Path = tmp_path_factory.mktemp("full_caches") / "model"
    write_toy("qwen3_moe", model, ToySize(layers=1), 0)
    with Fleet(ROLLOUT, model, tmp_path_factory.mktemp("logs"), precision=Precision.fp32) as fleet:
        yield fleet.url


async def measured(url: str, *, adaptive: bool) -> dict[str, float]:
    """Metrics and seconds of trajectories of one turn each, which begin as the slots allow."""
    watched = CachePressure(replace(ROLLOUT, adaptive_concurrency=adaptive), lambda: [url], KEY)
    watching, engine, slots = asyncio.create_task(watched.watch()), SglangEngine(url, key=KEY), watched.slots()

    async def one(number: int) -> None:
        async with slots:
            # With a token to stop at: of requests that cannot stop early SGLang takes in as many as surely fit.
            await engine.generate(
                GenerateRequest(
                    session_id=f"{adaptive}/{number}", input_ids=[5 + number, 7, 9], temperature=1.0, top_p=1.0,
                    top_k=-1, max_new_tokens=NEW_TOKENS, stop_token_ids=(3,), timeout_s=300.0,
                )
            )  # fmt: skip

    # What the engine has counted before, which it is asked for while a slot is taken.
    async with slots:
        await asyncio.sleep(2 * pressure.POLL_S)
    watched.take()
    start = time.monotonic()
    await asyncio.gather(*map(one, range(TRAJECTORIES)))
    seconds = time.monotonic() - start
    await asyncio.sleep(2 * pressure.POLL_S)
    watching.cancel()
    await engine.aclose()
    return {**watched.take(), "seconds": seconds}


@pytest.mark.full
async def test_an_engine_retracts_less_when_concurrency_adapts_to_its_cache(url, monkeypatch):
    monkeypatch.setattr(pressure, "POLL_S", 0.2)
    fixed, adapted = [await measured(url, adaptive=adaptive) for adaptive in (False, True)]
    print(fixed, adapted)
    assert fixed["rollout/retractions"] > 10
    assert fixed["rollout/token_usage_max"] > 0.9
    assert adapted["rollout/retractions"] < 0.5 * fixed["rollout/retractions"]
    assert 1 <= adapted["rollout/concurrency_limit"] < ROLLOUT.max_concurrency_per_engine
