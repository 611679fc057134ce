"""A resync from two trainer ranks, expert-parallel if the model has experts, into a real SGLang engine."""

import pytest
from engine_probes import KEY, engine_logprobs, transformers_logprobs
from ranks import run_ranks
from slimrl_tools.toy.toy import ToySize, write_toy
from slimrl_tools.toy.toy_configs import TOYS
from weight_sender import WeightSender

from slimrl.checkpoints.safetensors_file import spec_bytes
from slimrl.config.hf_config import num_experts
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.resync import ResyncConfig, TransportName, VerifyMode
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.config.schema.trainer import ParallelConfig
from slimrl.engines.servers.control import SglangControl
from slimrl.engines.servers.server import EngineServer
from slimrl.models.family import family_of
from slimrl.models.hf_config import read_hf_config
from slimrl.resync.session import ResyncReport, ResyncSession

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

SIZE = ToySize(init_std=0.1)
TIMEOUT_S = 90.0
WITH_FLOAT32 = ("deepseek_v32", "glm4_moe", "minimax_m2", "qwen3_next", "qwen3_5_moe")
"""Families of models that keep some tensors in float32"""


def resync_twice(rank, world_size, port, url, steps, precision) -> list[ResyncReport | None]:
    """Load each checkpoint into the trainer and send it over its transport; rank 0 asks the engine afterwards."""
    hf_config = read_hf_config(steps[0][1])
    parallel = ParallelConfig(expert=2) if num_experts(hf_config) else ParallelConfig(tensor=2)
    sender = WeightSender(rank, world_size, port, steps[0][1], parallel, precision, timeout_s=TIMEOUT_S)
    engine = SglangControl("engine 0", url, timeout_s=TIMEOUT_S, key=KEY)
    reports = []
    for version, (transport, path) in enumerate(steps, 1):
        sender.load(path)
        config = ResyncConfig(transport=transport, bucket_bytes=1_000_000, verify=VerifyMode.full, timeout_s=TIMEOUT_S)
        session = ResyncSession(sender.source, [engine], config, rank=rank, run_id=f"test-{transport.value}")
        reports.append(session.run(version))
        session.close()
        if rank == 0 and precision is Precision.fp32:
            difference = (engine_logprobs(url) - transformers_logprobs(path)).abs().max()
            assert difference < 2e-5, (transport, difference)
        if rank == 0:
            assert engine.version() == version
    sender.close()
    return reports


@pytest.mark.parametrize(
    ("family_name", "precision"),
    [
        ("qwen3_moe", Precision.fp32),
        *(pytest.param(name, Precision.fp32, marks=pytest.mark.full) for name in TOYS if name != "qwen3_moe"),
        *(pytest.param(name, Precision.bf16, marks=pytest.mark.full) for name in WITH_FLOAT32),
        ("qwen3_vl_moe", Precision.fp32),
        *(pytest.param(name, Precision.fp32, marks=pytest.mark.full) for name in ("qwen3_vl", "kimi_k25")),
        pytest.param("kimi_k25", Precision.bf16, marks=pytest.mark.full),
    ],
)
def test_an_engine_computes_with_what_the_trainer_sent(tmp_path, family_name, precision):
    first, second, third = (tmp_path / name for name in "abc")
    for seed, path in enumerate((first, second, third)):
        write_toy(family_name, path, SIZE, seed)
    rollout = RolloutConfig(max_trajectory_tokens=128, sglang={"max_total_tokens": 4096})
    server = EngineServer(0, rollout, first, tmp_path / "engine.log", precision=precision, key=KEY)
    try:
        server.wait_ready()
        steps = [(TransportName.collective, second), (TransportName.ipc, third)]
        reports, others = run_ranks(resync_twice, 2, server.url, steps, precision, timeout_s=200)
    finally:
        server.stop()
    assert others == [None, None]
    hf_config = read_hf_config(first)
    specs = family_of(hf_config).weight_map(hf_config).specs("bfloat16" if precision is Precision.bf16 else "float32")
    for report in reports:
        assert report.mismatching == ()
        assert report.verified_tensors == len(specs)
        assert report.bytes == sum(map(spec_bytes, specs))
        assert report.buckets > 1
