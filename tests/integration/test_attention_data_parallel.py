"""An engine of two groups of ranks, each with requests and a cache of its own, beside an engine of one rank."""

import asyncio

import numpy as np
import pytest
from checkpoint_source import CheckpointSource
from engine_probes import KEY, engine_logprobs, transformers_logprobs
from fleet import Fleet
from slimrl_tools.toy.toy import ToySize, write_toy

from slimrl import device
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.resync import ResyncConfig, VerifyMode
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.data.engine import GenerateRequest
from slimrl.engines.client import SglangEngine
from slimrl.engines.servers.control import EngineMemory, SglangControl
from slimrl.resync.session import ResyncSession

pytestmark = [
    pytest.mark.integration,
    pytest.mark.full,
    pytest.mark.timeout(300),
    pytest.mark.skipif(device.device_type() == "cuda", reason="the source of weights here is in host memory"),
]

SIZE = ToySize(init_std=0.1)
TIMEOUT_S = 60.0
GROUPS, SESSIONS, TURNS = 2, 11, 3
BUCKET_BYTES = 45_000
"""Cuts kv_b_proj, from which an engine derives what it computes with."""


def asked(session: int, turn: int, tokens: list[int], max_new_tokens: int) -> GenerateRequest:
    return GenerateRequest(
        session_id=f"session {session}", input_ids=tokens, temperature=1.0, top_p=1.0, top_k=-1, stop_token_ids=(),
        max_new_tokens=max_new_tokens, timeout_s=TIMEOUT_S, seed=100 * session + turn,
    )  # fmt: skip


async def talk(engine: SglangEngine, session: int):
    """Prompts and turns of several lengths, so that groups have different numbers of requests and tokens."""
    tokens, results = [3 + (17 * position + session) % 250 for position in range(10 + 13 * (session % 5))], []
    for turn in range(TURNS):
        results.append(await engine.generate(asked(session, turn, tokens, 3 + 5 * (session % 4))))
        tokens = [*tokens, *results[-1].tokens, 7, 8, 9]
    return results


async def talk_all(url: str):
    engine = SglangEngine(url, routed_experts_shape=(SIZE.layers, SIZE.experts_per_token), key=KEY)
    try:
        return await asyncio.gather(*(talk(engine, session) for session in range(SESSIONS)))
    finally:
        await engine.aclose()


async def pause_amid(engine_url: str, control: SglangControl) -> tuple[int, int]:
    """Requests under way before memory is released, and after; the requests are aborted."""
    engine = SglangEngine(engine_url, key=KEY)
    requests = [asyncio.create_task(engine.generate(asked(session, 0, [5, 6, 7], 1000))) for session in range(4)]
    async with asyncio.timeout(TIMEOUT_S):
        while (before := await asyncio.to_thread(control.running_requests)) < len(requests):
            await asyncio.sleep(0.05)
    await asyncio.to_thread(control.release_memory, list(EngineMemory))
    after = await asyncio.to_thread(control.running_requests)
    assert [(await request).finish_reason for request in requests] == ["abort"] * len(requests)
    await asyncio.to_thread(control.resume_memory, list(EngineMemory))
    await engine.aclose()
    return before, after


def test_groups_compute_what_one_rank_does_keep_their_sessions_and_get_new_weights(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for seed, path in enumerate((first, second)):
        write_toy("deepseek_v3", path, SIZE, seed)
    common = {"max_trajectory_tokens": 4096, "max_concurrency_per_engine": 16, "routed_experts": True}
    with Fleet(RolloutConfig(**common), first, tmp_path, precision=Precision.fp32) as fleet:
        expected = asyncio.run(talk_all(fleet.url))
    grouped = RolloutConfig(engine_tp=2, engine_ep=2, engine_attention_dp=GROUPS, **common)
    with Fleet(grouped, first, tmp_path, precision=Precision.fp32) as fleet:
        found = asyncio.run(talk_all(fleet.url))
        for session in range(SESSIONS):
            for turn, (one, other) in enumerate(zip(expected[session], found[session], strict=True)):
                assert other.tokens == one.tokens
                np.testing.assert_allclose(other.logprobs, one.logprobs, atol=2e-5)
                np.testing.assert_array_equal(np.sort(other.routed_experts), np.sort(one.routed_experts))
                assert other.cached_tokens == one.cached_tokens
                assert (other.cached_tokens > 0) == (turn > 0)
        control = SglangControl("engine 0", fleet.url, timeout_s=TIMEOUT_S, num_ranks=2, key=KEY)
        source = CheckpointSource(second)
        config = ResyncConfig(bucket_bytes=BUCKET_BYTES, verify=VerifyMode.full, timeout_s=TIMEOUT_S)
        session = ResyncSession(source, [control], config, rank=0, run_id="groups")
        report = session.run(1)
        assert (report.mismatching, report.failed_engines) == ((), {})
        assert report.verified_tensors == len(source.layout())
        for group in range(GROUPS):
            difference = engine_logprobs(fleet.url, group=group) - transformers_logprobs(second)
            assert difference.abs().max() < 2e-5, group
        assert asyncio.run(pause_amid(fleet.url, control)) == (4, 0)
        # The memory held nothing, and holds the version again.
        report = session.run(2)
        assert (report.mismatching, control.version()) == ((), 2)
        difference = engine_logprobs(fleet.url, group=1) - transformers_logprobs(second)
        assert difference.abs().max() < 2e-5
        session.close()
        control.close()
