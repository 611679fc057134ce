"""A resync from two expert-parallel trainer ranks into a real SGLang engine, over both transports."""

from pathlib import Path

import httpx
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from slimrl_tools.toy import ToySize, write_toy
from transformers import AutoModelForCausalLM

from slimrl.config.schema import (
    OptimizerConfig,
    ParallelConfig,
    Precision,
    ResyncConfig,
    RolloutConfig,
    TrainerConfig,
    TransportName,
    VerifyMode,
)
from slimrl.models.family import family_of
from slimrl.models.hf_config import read_hf_config
from slimrl.resync.session import ResyncReport, ResyncSession
from slimrl.rollout.control import SglangControl
from slimrl.rollout.server import EngineServer
from slimrl.trainer.build import build_model
from slimrl.trainer.parallel import init_parallel
from slimrl.trainer.weight_source import MegatronWeightSource
from slimrl.trainer.weights import load_hf_weights

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

SIZE = ToySize(init_std=0.1)
PROMPT = [5, 300, 77, 41, 12, 260, 99, 8, 130, 211]
TIMEOUT_S = 90.0


def engine_logprobs(url: str) -> torch.Tensor:
    """float32 [len(PROMPT) - 1]: of each prompt token but the first."""
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    answer = httpx.post(f"{url}/generate", json=body, timeout=TIMEOUT_S).raise_for_status().json()
    return torch.tensor([entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]])


@torch.no_grad()
def transformers_logprobs(path: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    logits_TV = model(torch.tensor([PROMPT])).logits[0, :-1]
    return logits_TV.log_softmax(-1).gather(-1, torch.tensor(PROMPT[1:])[:, None])[:, 0]


def resync_twice(rank, world_size, port, url, steps) -> list[ResyncReport | None]:
    """Load each checkpoint into the trainer and send it over its transport; rank 0 asks the engine afterwards."""
    parallel = ParallelConfig(expert=2)
    init_parallel(
        parallel, rank=rank, world_size=world_size, master_addr="127.0.0.1", master_port=port,
        timeout_s=TIMEOUT_S, seed=0,
    )  # fmt: skip
    trainer = TrainerConfig(
        parallel=parallel, precision=Precision.fp32, max_tokens_per_rank=64, optimizer=OptimizerConfig(lr=1e-3)
    )
    hf_config = read_hf_config(steps[0][1])
    family = family_of(hf_config)
    chunks = build_model(trainer, family.megatron_config(hf_config))
    source = MegatronWeightSource(chunks, family, hf_config)
    engine = SglangControl("engine 0", url, timeout_s=TIMEOUT_S)
    reports = []
    for version, (transport, path) in enumerate(steps, 1):
        load_hf_weights(chunks, path, family, hf_config)
        config = ResyncConfig(transport=transport, bucket_bytes=1_000_000, verify=VerifyMode.full, timeout_s=TIMEOUT_S)
        session = ResyncSession(source, [engine], config, rank=rank, run_id=f"test-{transport.value}")
        reports.append(session.run(version))
        session.close()
        if rank == 0:
            difference = (engine_logprobs(url) - transformers_logprobs(path)).abs().max()
            assert difference < 2e-5, (transport, difference)
            assert engine.version() == version
    dist.destroy_process_group()
    return reports


def test_an_engine_computes_with_what_the_trainer_sent(tmp_path):
    first, second, third = (tmp_path / name for name in "abc")
    sizes = {write_toy("qwen3_moe", path, SIZE, seed) for seed, path in enumerate((first, second, third))}
    (num_parameters,) = sizes
    rollout = RolloutConfig(max_trajectory_tokens=128, sglang={"max_total_tokens": 4096})
    server = EngineServer(0, rollout, first, tmp_path / "engine.log", precision=Precision.fp32)
    try:
        server.wait_ready()
        steps = [(TransportName.collective, second), (TransportName.ipc, third)]
        reports, others = run_ranks(resync_twice, 2, server.url, steps, timeout_s=200)
    finally:
        server.stop()
    assert others == [None, None]
    num_tensors = len(family_of(read_hf_config(first)).hf_tensor_specs(read_hf_config(first)))
    for report in reports:
        assert report.fingerprint_mismatches == 0
        assert report.verified_tensors == num_tensors
        assert report.bytes == 4 * num_parameters
        assert report.buckets > 3
