"""A resync from two trainer ranks, expert-parallel if the model has experts, into a real SGLang engine."""

from itertools import groupby

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
from slimrl.toys.wrapped_toys import WRAPPED_TOYS

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

SIZE = ToySize(init_std=0.1)
TIMEOUT_S = 90.0
WITH_FLOAT32 = ("deepseek_v32", "glm4_moe", "minimax_m2", "qwen3_next", "qwen3_5_moe")
"""Families of models that keep some tensors in float32"""

WITHOUT_DRAFTS = (
    "qwen3", "qwen3_moe", "qwen2", "llama", "minimax_m2", "gpt_oss", "olmoe", "qwen3_vl", "qwen3_vl_moe", "kimi_k25",
)  # fmt: skip
"""Families and kinds of wrapped models without layers for multi-token prediction here. test_resync_drafts.py sends the
others over every transport."""


def resyncs(rank, world_size, port, url, steps, precision, folder) -> list[ResyncReport | None]:
    """Load each checkpoint into the trainer and send it over its transport; rank 0 asks the engine afterwards."""
    hf_config = read_hf_config(steps[0][1])
    parallel = ParallelConfig(expert=2) if num_experts(hf_config) else ParallelConfig(tensor=2)
    sender = WeightSender(rank, world_size, port, steps[0][1], parallel, precision, timeout_s=TIMEOUT_S)
    engine = SglangControl("engine 0", url, timeout_s=TIMEOUT_S, key=KEY)
    reports = []
    for transport, versions in groupby(enumerate(steps, 1), key=lambda step: step[1][0]):
        config = ResyncConfig(
            transport=transport, bucket_bytes=1_000_000, verify=VerifyMode.full, timeout_s=TIMEOUT_S,
            local_dir=str(folder / "local"),
        )  # fmt: skip
        session = ResyncSession(
            sender.source, [engine], config, rank=rank, run_id=f"test-{transport.value}", model_dir=steps[0][1],
            run_dir=folder / transport.value,
        )  # fmt: skip
        for version, (_, path) in versions:
            sender.load(path)
            reports.append(session.run(version))
            if rank == 0 and precision is Precision.fp32:
                difference = (engine_logprobs(url) - transformers_logprobs(path)).abs().max()
                assert difference < 2e-5, (transport, difference)
            if rank == 0:
                assert engine.version() == version
        session.close()
    sender.close()
    return reports


def synced(tmp_path, family_name, transports, precision) -> list[ResyncReport]:
    """Reports of resyncs to an engine, of one checkpoint and another in turn."""
    paths = [tmp_path / name for name in "abc"]
    for seed, path in enumerate(paths):
        write_toy(family_name, path, SIZE, seed)
    rollout = RolloutConfig(max_trajectory_tokens=128, sglang={"max_total_tokens": 4096})
    server = EngineServer(0, rollout, paths[0], tmp_path / "engine.log", precision=precision, key=KEY)
    try:
        server.wait_ready()
        steps = [(transport, paths[1 + number % 2]) for number, transport in enumerate(transports)]
        reports, others = run_ranks(resyncs, 2, server.url, steps, precision, tmp_path, timeout_s=200)
    finally:
        server.stop()
    assert others == [None] * len(steps)
    return reports


@pytest.mark.parametrize(
    ("family_name", "precision"),
    [
        ("qwen3_moe", Precision.fp32),
        *(pytest.param(name, Precision.fp32, marks=pytest.mark.full) for name in TOYS if name != "qwen3_moe"),
        *(pytest.param(name, Precision.bf16, marks=pytest.mark.full) for name in WITH_FLOAT32),
        ("qwen3_vl_moe", Precision.fp32),
        *(
            pytest.param(name, Precision.fp32, marks=pytest.mark.full)
            for name in WRAPPED_TOYS
            if name != "qwen3_vl_moe"
        ),
        pytest.param("kimi_k25", Precision.bf16, marks=pytest.mark.full),
    ],
)
def test_an_engine_computes_with_what_the_trainer_sent(tmp_path, family_name, precision):
    reports = synced(tmp_path, family_name, [TransportName.p2p, TransportName.ipc], precision)
    hf_config = read_hf_config(tmp_path / "a")
    specs = family_of(hf_config).weight_map(hf_config).specs("bfloat16" if precision is Precision.bf16 else "float32")
    for report in reports:
        assert report.mismatching == ()
        assert report.verified_tensors == len(specs)
        assert report.bytes == sum(map(spec_bytes, specs))
        assert report.buckets > 1


@pytest.mark.full
@pytest.mark.parametrize("family_name", WITHOUT_DRAFTS)
def test_an_engine_computes_with_the_versions_of_a_disk(tmp_path, family_name):
    reports = synced(
        tmp_path, family_name, [TransportName.disk, TransportName.delta, TransportName.delta], Precision.fp32
    )
    hf_config = read_hf_config(tmp_path / "a")
    specs = family_of(hf_config).weight_map(hf_config).specs("float32")
    for report in reports:
        assert report.mismatching == ()
        assert report.verified_tensors == len(specs)
