"""Turns on a real engine while a resync changes its weights, and turns out of several requests."""

import asyncio
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_source import CheckpointSource
from engine_probes import KEY
from fleet import Fleet
from slimrl_tools.toy.toy import ToySize, write_toy
from slimrl_tools.toy.toy_tokenizer import build_tokenizer
from transformers import AutoModelForCausalLM

from slimrl import device
from slimrl.agent.chat.template import ChatTemplate
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.resync import PauseMode, ResyncConfig, VerifyMode
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.data.engine import Engine, GenerateRequest, GenerateResult
from slimrl.engines.client import SglangEngine
from slimrl.engines.continued import ContinuedEngine
from slimrl.engines.servers.control import SglangControl
from slimrl.resync.session import ResyncSession

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(240),
    pytest.mark.skipif(device.device_type() == "cuda", reason="the source of weights here is in host memory"),
]

SIZE = ToySize(init_std=0.1)
SHAPE = (SIZE.layers, SIZE.experts_per_token)
ROLLOUT = RolloutConfig(
    max_trajectory_tokens=512, max_concurrency_per_engine=16, routed_experts=True, startup_timeout_s=200
)
NEW = 300
"""Tokens of a turn"""
DECODE = ChatTemplate(build_tokenizer()).decode


class Weights:
    """An engine whose weights alternate between two models: version v has those of model v % 2."""

    def __init__(self, folder: Path) -> None:
        self.paths = [folder / name for name in ("even", "odd")]
        for seed, path in enumerate(self.paths):
            write_toy("qwen3_moe", path, SIZE, seed)
        self.version = 0
        self.url = ""
        self._model = cache(lambda path: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))

    def resync(self, mode: PauseMode, *, flush_cache: bool = True) -> None:
        self.version += 1
        control = SglangControl("engine 0", self.url, timeout_s=60, key=KEY)
        config = ResyncConfig(pause=mode, verify=VerifyMode.full, timeout_s=60, flush_cache=flush_cache)
        source = CheckpointSource(self.paths[self.version % 2])
        session = ResyncSession(source, [control], config, rank=0, run_id=f"versions-{self.version}")
        report = session.run(self.version)
        session.close()
        control.close()
        assert report is not None
        assert (report.mismatching, report.failed_engines) == ((), {})

    @torch.no_grad()
    def of_transformers(self, version: int, context: list[int], tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Log-probs of the tokens after the context, and experts [rows, layers, topk] of all but the last token."""
        output = self._model(self.paths[version % 2])(torch.tensor([context + tokens]), output_router_logits=True)
        logprobs_TV = output.logits[0, len(context) - 1 : -1].log_softmax(-1)
        experts = [logits.topk(SIZE.experts_per_token).indices[:-1] for logits in output.router_logits]
        logprobs = logprobs_TV.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        return logprobs.numpy(), torch.stack(experts, 1).sort(-1).values.numpy()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    weights = Weights(tmp_path_factory.mktemp("versions"))
    with Fleet(ROLLOUT, weights.paths[0], tmp_path_factory.mktemp("logs"), precision=Precision.fp32) as fleet:
        weights.url = fleet.url
        yield weights


@pytest.fixture
def weights(served: Weights) -> Weights:
    """With an empty prefix cache: a pause in place keeps what older versions have computed."""
    control = SglangControl("engine 0", served.url, timeout_s=60, key=KEY)
    control.flush_when_idle()
    control.close()
    return served


def ask(session: str, tokens: list[int], new: int = NEW) -> GenerateRequest:
    return GenerateRequest(
        session_id=session, input_ids=tokens, temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=new,
        stop_token_ids=(), timeout_s=90.0, seed=len(tokens),
    )  # fmt: skip


def prompt(index: int) -> list[int]:
    return [3 + (17 * index + 7 * position) % 250 for position in range(5 + 4 * index)]


async def running(weights: Weights, count: int) -> None:
    """Wait until the engine is in the midst of so many requests."""
    control = SglangControl("engine 0", weights.url, timeout_s=60, key=KEY)
    while control.running_requests() < count:
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.2)
    control.close()


@pytest.fixture
async def engine(weights: Weights):
    engine = SglangEngine(weights.url, routed_experts_shape=SHAPE, key=KEY)
    yield engine
    await engine.aclose()


async def results_amid_resync(weights: Weights, engine: Engine, mode: PauseMode) -> list[GenerateResult]:
    tasks = [asyncio.create_task(engine.generate(ask(f"{mode.value}-{i}", prompt(i)))) for i in range(6)]
    await running(weights, 6)
    await asyncio.to_thread(weights.resync, mode)
    return await asyncio.gather(*tasks)


@pytest.mark.parametrize(
    "mode",
    [
        PauseMode.retract,
        *(pytest.param(mode, marks=pytest.mark.full) for mode in (PauseMode.abort, PauseMode.in_place)),
    ],
)
async def test_each_token_has_the_version_that_sampled_it(weights: Weights, engine: SglangEngine, mode: PauseMode):
    old = weights.version
    whole = ContinuedEngine(engine, chunk_tokens=0, decode=DECODE)
    results = await results_amid_resync(weights, whole if mode is PauseMode.abort else engine, mode)
    firsts = []
    for index, result in enumerate(results):
        assert (len(result.tokens), result.finish_reason) == (NEW, "length")
        assert len(result.routed_experts) == len(prompt(index)) + NEW - 1, "no row is missing or double"
        switch = int((result.weight_versions == old).sum())
        assert 0 < switch < NEW
        assert result.weight_versions.tolist() == [old] * switch + [old + 1] * (NEW - switch)
        (by_old, old_experts), (by_new, new_experts) = (
            weights.of_transformers(version, prompt(index), result.tokens) for version in (old, old + 1)
        )
        errors = np.abs(by_old - result.logprobs)
        assert errors[:switch].max() < 2e-5
        firsts.append(errors[switch])
        assert np.median(errors[switch:]) > 1e-2
        if mode is not PauseMode.in_place:
            assert np.abs(by_new - result.logprobs)[switch:].max() < 2e-5
        # A request that was retracted has been computed again as a whole.
        expected = new_experts if mode is PauseMode.retract else old_experts
        known = len(prompt(index)) + switch - 1
        assert (np.sort(result.routed_experts) == expected)[:known].mean() > 0.99
    # No switch is a token too early; by chance, both weights may give a token the same probability.
    assert np.median(firsts) > 1e-2


@pytest.mark.full
async def test_what_is_aborted_in_the_engines_queue_goes_on(weights: Weights, engine: SglangEngine):
    control = SglangControl("engine 0", weights.url, timeout_s=60, key=KEY)
    plain = asyncio.create_task(engine.generate(ask("plain", prompt(1))))
    whole = ContinuedEngine(engine, chunk_tokens=0, decode=DECODE)
    continued = asyncio.create_task(whole.generate(ask("continued", prompt(2))))
    await running(weights, 2)
    await asyncio.to_thread(control.pause, PauseMode.retract)
    await asyncio.to_thread(control.pause, PauseMode.abort)
    assert (await plain).finish_reason == "abort"
    await asyncio.sleep(0.3)
    assert not continued.done()
    control.resume()
    control.close()
    result = await continued
    expected, _ = weights.of_transformers(weights.version, prompt(2), result.tokens)
    assert (len(result.tokens), result.finish_reason) == (NEW, "length")
    assert np.abs(expected - result.logprobs).max() < 2e-5


@pytest.mark.full
@pytest.mark.parametrize("flush_cache", [True, False])
async def test_tokens_over_a_kept_cache_are_those_that_the_new_weights_alone_do_not_explain(
    weights: Weights, flush_cache: bool
):
    engine = SglangEngine(weights.url, routed_experts_shape=SHAPE, keeps_caches=not flush_cache, key=KEY)
    first = await engine.generate(ask("kept", prompt(3), 62))
    context = prompt(3) + first.tokens + [9, 9, 9]
    await asyncio.to_thread(weights.resync, PauseMode.abort, flush_cache=flush_cache)
    second = await engine.generate(ask("kept", context, 62))
    expected, _ = weights.of_transformers(weights.version, context, second.tokens)
    error = np.abs(expected - second.logprobs).max()
    if flush_cache:
        assert (second.cached_tokens, second.counts) == (0, {})
        assert error < 2e-5
    else:
        assert second.cached_tokens > len(prompt(3))
        assert (first.counts, second.counts) == ({"num_stale_cache_tokens": 0}, {"num_stale_cache_tokens": 62})
        assert error > 1e-2
    await engine.aclose()


def assert_same_turn(parts: GenerateResult, whole: GenerateResult) -> None:
    assert (parts.tokens, parts.finish_reason) == (whole.tokens, whole.finish_reason)
    np.testing.assert_allclose(parts.logprobs, whole.logprobs, atol=1e-5)
    assert parts.weight_versions.tolist() == whole.weight_versions.tolist()
    np.testing.assert_array_equal(np.sort(parts.routed_experts), np.sort(whole.routed_experts))


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.full), 1.0])
async def test_turns_in_chunks_equal_whole_turns(engine: SglangEngine, temperature: float):
    """Also sampled ones, of which each has a seed."""
    requests = [replace(ask(f"chunks-{i}", prompt(i), 62), temperature=temperature, experts_from=i) for i in range(8)]
    whole = await asyncio.gather(*map(engine.generate, requests))
    assert len({tuple(result.tokens) for result in whole}) == 8
    for chunk_tokens in (1, 5):
        chunks = ContinuedEngine(engine, chunk_tokens=chunk_tokens, decode=DECODE)
        for one, other in zip(await asyncio.gather(*map(chunks.generate, requests)), whole, strict=True):
            assert_same_turn(one, other)


@pytest.mark.full
async def test_a_stop_text_across_two_chunks_ends_a_turn_where_the_engine_ends_a_whole_one(engine: SglangEngine):
    chunks = ContinuedEngine(engine, chunk_tokens=5, decode=DECODE)
    num_across = 0
    for index in range(4):
        request = ask(f"stop-{index}", prompt(index), 62)
        tokens = (await engine.generate(request)).tokens
        for begin in range(3, 55, 4):
            text = DECODE(tokens[begin : begin + 4])
            if "\N{REPLACEMENT CHARACTER}" in text or text in DECODE(tokens[: begin + 3]):
                continue
            stopping = replace(request, stop=("never said", text))
            whole = await engine.generate(stopping)
            assert (whole.tokens, whole.finish_reason) == (tokens[: begin + 4], "stop")
            assert_same_turn(await chunks.generate(stopping), whole)
            num_across += begin // 5 != (begin + 3) // 5
    assert num_across >= 5
