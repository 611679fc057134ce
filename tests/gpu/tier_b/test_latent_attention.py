"""An engine of DeepSeek-V3's architecture after a release of its memory and a resync of other weights."""

from pathlib import Path

import httpx
import pytest
from engine_probes import KEY
from machine import choose, on_gpu
from ranks import run_ranks
from sending_rank import TIMEOUT_S, send_and_export
from slimrl_tools.toy.toy import ToySize, write_toy

from slimrl.config.schema.precision import Precision
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.engines.servers.control import EngineMemory, SglangControl
from slimrl.engines.servers.server import EngineServer

pytestmark = pytest.mark.timeout(600)

NUM_TOKENS = 24
PROMPTS = [[5, 300, 77, 41, 12], [260, 99, 8], list(range(40, 80))]
GPU_SIZE = ToySize(layers=2, hidden=1024, head_dim=128, moe_intermediate=256, init_std=0.03)
"""Its heads and latents have the sizes of the published model, for which the kernels are made."""


def server(model: Path, log: Path) -> EngineServer:
    rollout = RolloutConfig(
        max_trajectory_tokens=128, startup_timeout_s=200, colocated=True,
        sglang={"max_total_tokens": 4096, "mem_fraction_static": 0.3} if on_gpu() else {"max_total_tokens": 4096},
    )  # fmt: skip
    return EngineServer(0, rollout, model, log, precision=Precision.bf16, cuda=on_gpu(), key=KEY)


def greedy(url: str) -> list[list[int]]:
    """The likeliest continuation of each prompt. One at a time: in a batch, whose members depend on when requests
    arrive, the last bits of bfloat16 would decide between tokens that are about as likely.
    """
    options = {"max_new_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    return [
        httpx.post(
            f"{url}/generate",
            json={"input_ids": prompt, "sampling_params": options},
            headers=KEY.headers,
            timeout=TIMEOUT_S,
            trust_env=False,
        )
        .raise_for_status()
        .json()["output_ids"]
        for prompt in PROMPTS
    ]


@pytest.mark.proves("weights derived from weights, and CUDA graphs that point to them, survive a release and a resync")
def test_an_engine_that_was_released_and_sent_other_weights_generates_as_a_fresh_one(tmp_path, figure):
    for seed, name in enumerate(("first", "second")):
        write_toy("deepseek_v3", tmp_path / name, choose(GPU_SIZE, ToySize(layers=2)), seed)
    running = server(tmp_path / "first", tmp_path / "engine.log")
    try:
        running.wait_ready()
        control = SglangControl("engine 0", running.url, timeout_s=TIMEOUT_S, key=KEY)
        before = greedy(running.url)
        control.release_memory(list(EngineMemory))
        control.resume_memory([EngineMemory.weights])
        control.resume_memory([EngineMemory.kv_cache, EngineMemory.cuda_graph])
        ((mismatching, buckets, seconds),) = run_ranks(
            send_and_export, 1, running.url, tmp_path / "second", tmp_path / "export", timeout_s=150
        )
        assert mismatching == ()
        assert buckets > 1
        found = greedy(running.url)
    finally:
        running.stop()
    assert found != before
    fresh = server(tmp_path / "export", tmp_path / "fresh.log")
    try:
        fresh.wait_ready()
        assert greedy(fresh.url) == found
    finally:
        fresh.stop()
    figure(f"resync {seconds:.2f} s, {len(PROMPTS) * NUM_TOKENS} tokens equal")
