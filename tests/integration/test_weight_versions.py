"""Requests that run on a real engine while a resync changes its weights."""

import asyncio
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_source import CheckpointSource
from fleet import Fleet
from slimrl_tools.toy.toy import ToySize, write_toy
from transformers import AutoModelForCausalLM

from slimrl import device
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.resync import PauseMode, ResyncConfig, VerifyMode
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.data.engine import GenerateRequest, GenerateResult
from slimrl.resync.session import ResyncSession
from slimrl.rollout.client import SglangEngine
from slimrl.rollout.servers.control import SglangControl

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(240),
    pytest.mark.skipif(device.device_type() == "cuda", reason="the source of weights here is in host memory"),
]

SIZE = ToySize(init_std=0.1)
SHAPE = (SIZE.layers, SIZE.experts_per_token)
ROLLOUT = RolloutConfig(
    max_trajectory_tokens=512, max_concurrency_per_engine=16, routed_experts=True, router=False, startup_timeout_s=200
)
NEW = 300
"""Tokens of a turn"""


class Weights:
    """An engine whose weights alternate between two models: version v has those of model v % 2."""

    def __init__(self, folder: Path) -> None:
        self.paths = [folder / name for name in ("even", "odd")]
        for seed, path in enumerate(self.paths):
            write_toy("qwen3_moe", path, SIZE, seed)
        self.version = 0
        self.url = ""
        self._model = cache(lambda path: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))

    def resync(self, mode: PauseMode) -> None:
        self.version += 1
        control = SglangControl("engine 0", self.url, timeout_s=60)
        config = ResyncConfig(pause=mode, verify=VerifyMode.full, timeout_s=60)
        source = CheckpointSource(self.paths[self.version % 2])
        session = ResyncSession(source, [control], config, rank=0, run_id=f"versions-{self.version}")
        report = session.run(self.version)
        session.close()
        control.close()
        assert report is not None
        assert (report.mismatching, report.failed_engines) == ((), {})

    @torch.no_grad()
    def logprobs(self, version: int, context: list[int], tokens: list[int]) -> np.ndarray:
        """Of the tokens after the context, by transformers."""
        logits_TV = self._model(self.paths[version % 2])(torch.tensor([context + tokens])).logits[0]
        logprobs_TV = logits_TV[len(context) - 1 : -1].log_softmax(-1)
        return logprobs_TV.gather(-1, torch.tensor(tokens)[:, None])[:, 0].numpy()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    weights = Weights(tmp_path_factory.mktemp("versions"))
    with Fleet(ROLLOUT, weights.paths[0], tmp_path_factory.mktemp("logs"), precision=Precision.fp32) as fleet:
        weights.url = fleet.url
        yield weights


@pytest.fixture
def weights(served: Weights) -> Weights:
    """With an empty prefix cache: a pause in place keeps what older versions have computed."""
    control = SglangControl("engine 0", served.url, timeout_s=60)
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
    control = SglangControl("engine 0", weights.url, timeout_s=60)
    while control.running_requests() < count:
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.2)
    control.close()


@pytest.mark.parametrize("mode", [PauseMode.in_place, PauseMode.retract])
async def test_each_token_has_the_version_that_sampled_it(weights: Weights, mode: PauseMode):
    engine = SglangEngine(weights.url, routed_experts_shape=SHAPE)
    old = weights.version
    tasks = [asyncio.create_task(engine.generate(ask(f"{mode.value}-{i}", prompt(i)))) for i in range(6)]
    await running(weights, 6)
    await asyncio.to_thread(weights.resync, mode)
    results: list[GenerateResult] = await asyncio.gather(*tasks)
    await engine.aclose()
    firsts = []
    for index, result in enumerate(results):
        switch = int((result.weight_versions == old).sum())
        assert 0 < switch < NEW == len(result.tokens)
        assert result.weight_versions.tolist() == [old] * switch + [old + 1] * (NEW - switch)
        by_old, by_new = (weights.logprobs(version, prompt(index), result.tokens) for version in (old, old + 1))
        errors = np.abs(by_old - result.logprobs)
        assert errors[:switch].max() < 2e-5
        firsts.append(errors[switch])
        assert np.median(errors[switch:]) > 1e-2
        if mode is PauseMode.retract:
            assert np.abs(by_new - result.logprobs)[switch:].max() < 2e-5
    # No switch is a token too early; by chance, both weights may give a token the same probability.
    assert np.median(firsts) > 1e-2
