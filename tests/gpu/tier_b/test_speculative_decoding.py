"""Engines with speculative decoding sample from the policy's own distribution, also after a resync.

On a CPU, where SGLang has none that samples, the same runs with plain decoding.
"""

import asyncio
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_probes import KEY
from machine import choose, on_gpu
from ranks import run_ranks
from sending_rank import TIMEOUT_S, send_and_export
from slimrl_tools.toy.toy import ToySize, write_toy
from transformers import AutoModelForCausalLM

from slimrl import device
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.config.schema.speculative import DraftMode, SpeculativeConfig
from slimrl.data.engine import GenerateRequest, GenerateResult
from slimrl.engines.client import SglangEngine
from slimrl.engines.servers.server import EngineServer

pytestmark = pytest.mark.timeout(600)

SIZE = choose(
    ToySize(layers=2, hidden=1024, head_dim=128, moe_intermediate=256, init_std=0.03, mtp_layers=1),
    ToySize(layers=2, mtp_layers=1),
)
PROMPT = [5, 300, 77, 41, 12]
SAMPLES, NUM_TOKENS = choose(256, 48), 32
Z_LIMIT = 5.0
"""Standard deviations; greedy verification would be dozens away."""


def ask(number: int, temperature: float) -> GenerateRequest:
    return GenerateRequest(
        session_id=f"sample {number}", input_ids=PROMPT, temperature=temperature, top_p=1.0, top_k=-1,
        max_new_tokens=NUM_TOKENS, stop_token_ids=(), timeout_s=TIMEOUT_S,
    )  # fmt: skip


async def sample(url: str, temperature: float) -> list[GenerateResult]:
    engine = SglangEngine(url, key=KEY)
    answers = await asyncio.gather(*(engine.generate(ask(number, temperature)) for number in range(SAMPLES)))
    await engine.aclose()
    return answers


@torch.no_grad()
def logits(model: Path, sequences: list[list[int]]) -> torch.Tensor:
    """float32 [sequences, NUM_TOKENS, vocabulary]: of what follows the prompt."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).to(device.compute_device())
    inputs = torch.tensor([PROMPT + tokens for tokens in sequences], device=device.compute_device())
    return torch.cat([loaded(rows).logits[:, len(PROMPT) - 1 : -1].float().cpu() for rows in inputs.split(16)])


def temperature_of(model: Path) -> float:
    """At which the likeliest token has about half of the probability, so that drafts are accepted and refused."""
    rows = logits(model, [[(7 * place) % 250 + 3 for place in range(NUM_TOKENS)]])[0]
    low, high = 1e-3, 10.0
    for _ in range(40):
        middle = math.sqrt(low * high)
        is_sharp = (rows / middle).softmax(-1).max(-1).values.mean() > 0.5
        low, high = (middle, high) if is_sharp else (low, middle)
    return high


def surplus_of_likeliest(model: Path, answers: list[GenerateResult], temperature: float) -> float:
    """By how many standard deviations the likeliest token was sampled more often than the model says."""
    tokens = torch.tensor([answer.tokens for answer in answers])
    probabilities, likeliest = (logits(model, tokens.tolist()) / temperature).softmax(-1).max(-1)
    hits = (tokens == likeliest).double()
    expected = probabilities.double()
    return float((hits - expected).sum() / (expected * (1 - expected)).sum().sqrt())


@pytest.mark.proves("speculative decoding samples from the policy, and from the new one after a resync")
@pytest.mark.parametrize("mode", [DraftMode.ngram, DraftMode.mtp])
def test_drafts_do_not_change_the_distribution(tmp_path, figure, mode):
    for seed, name in enumerate(("first", "second")):
        write_toy("deepseek_v3", tmp_path / name, SIZE, seed)
    rollout = RolloutConfig(
        max_trajectory_tokens=128, startup_timeout_s=200, max_concurrency_per_engine=64,
        speculative=SpeculativeConfig(mode=choose(mode, DraftMode.off)),
        sglang={"max_total_tokens": 16384, "mem_fraction_static": 0.3} if on_gpu() else {"max_total_tokens": 16384},
    )  # fmt: skip
    server = EngineServer(
        0, rollout, tmp_path / "first", tmp_path / "engine.log", precision=Precision.bf16, cuda=on_gpu(), key=KEY
    )
    try:
        server.wait_ready()
        temperature = temperature_of(tmp_path / "first")
        before = asyncio.run(sample(server.url, temperature))
        plain = asyncio.run(sample(server.url, 1.0))
        ((mismatching, _, _),) = run_ranks(
            send_and_export, 1, server.url, tmp_path / "second", tmp_path / "export", timeout_s=150
        )
        assert mismatching == ()
        after = asyncio.run(sample(server.url, temperature))
    finally:
        server.stop()
    surpluses = [
        surplus_of_likeliest(tmp_path / "first", before, temperature),
        surplus_of_likeliest(tmp_path / "export", after, temperature),
    ]
    assert max(map(abs, surpluses)) < Z_LIMIT, surpluses
    tokens = torch.tensor([answer.tokens for answer in plain])
    expected = logits(tmp_path / "first", tokens.tolist()).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    assert np.abs(expected.numpy() - [answer.logprobs for answer in plain]).mean() < 0.02
    drafts = [sum(one.counts.get(f"num_{kind}draft_tokens", 0) for one in before) for kind in ("", "accepted_")]
    if on_gpu():
        assert 0 < drafts[1] < drafts[0]
    figure(f"{mode.value}: {drafts[1]} of {drafts[0]} drafts accepted, surplus {surpluses[0]:.1f}, {surpluses[1]:.1f}")
