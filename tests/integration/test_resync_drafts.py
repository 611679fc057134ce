"""A resync of trained layers for multi-token prediction to the real draft models of real engines, over each transport.

An engine without a GPU loads a draft model, though it cannot draft.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cpu_drafts import plugin_folder
from engine_probes import KEY
from ranks import run_ranks
from slimrl_tools.toy.toy import ToySize, write_toy
from weight_cases import trainer_config

from slimrl import device
from slimrl.checkpoints.checkpoint_reader import read_whole
from slimrl.checkpoints.hf_checkpoint import open_hf_checkpoint
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.resync import ResyncConfig, TransportName, VerifyMode
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.config.schema.speculative import DraftMode, SpeculativeConfig
from slimrl.config.schema.trainer import MtpConfig, ParallelConfig
from slimrl.engines.servers.control import SglangControl
from slimrl.engines.servers.server import EngineServer
from slimrl.models.fingerprint import fingerprint
from slimrl.resync.session import ResyncSession
from slimrl.trainer.weights import load_hf_weights
from slimrl.trainer.worker import TrainerWorker

pytestmark = [
    pytest.mark.integration,
    pytest.mark.full,
    pytest.mark.timeout(500),
    pytest.mark.skipif(device.device_type() == "cuda", reason="with a GPU tests/gpu has engines that draft"),
]

TIMEOUT_S = 90.0
BUCKET_BYTES = 30_000
"""Less than the projection of a layer for multi-token prediction has, so that its rows are copied."""
VERSIONS = [TransportName.ipc, TransportName.p2p, TransportName.disk, TransportName.delta, TransportName.delta]


def send_over_each_transport(rank, world_size, port, url, num_ranks, models, drafted, folder):
    """For each version: the tensors that differ, how many were compared, and the draft model's fingerprints."""
    trainer = replace(
        trainer_config(ParallelConfig()), mtp=MtpConfig(train=True), num_ranks=1, precision=Precision.bf16
    )
    worker = TrainerWorker(
        trainer, models[0], seed=1, rank=rank, world_size=world_size, meeting=f"tcp://127.0.0.1:{port}",
        total_updates=1,
    )  # fmt: skip
    engine = SglangControl("engine 0", url, timeout_s=TIMEOUT_S, num_ranks=num_ranks, updates_draft=True, key=KEY)
    outcomes, session, last = [], None, None
    for version, transport in enumerate(VERSIONS, start=1):
        load_hf_weights(worker.chunks, models[version % 2], worker.family, worker.hf_config)
        if session is None or transport is not last:
            if session is not None:
                session.close()
            config = ResyncConfig(
                transport=transport, bucket_bytes=BUCKET_BYTES, verify=VerifyMode.full, timeout_s=TIMEOUT_S,
                local_dir=str(folder / "local"), full_every=5,
            )  # fmt: skip
            session = ResyncSession(
                worker.weight_source(mtp=True), [engine], config, rank=rank, run_id=transport.value,
                model_dir=models[0], run_dir=folder / transport.value,
            )  # fmt: skip
        last = transport
        report = session.run(version)
        outcomes.append((report.mismatching, report.verified_tensors, engine.draft_fingerprints(drafted)))
    session.close()
    engine.close()
    worker.close()
    return outcomes


def text_tensors(path: Path) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors, of a wrapped model those of its text model."""
    with open_hf_checkpoint(path) as folder:
        return {name: read_whole(folder, name) for name in folder.specs}


def held_by_drafts(name: str, layers: int) -> bool:
    copies = ("embed_tokens.weight", "shared_head.head.weight")
    return name.startswith((f"model.layers.{layers}.", "mtp.")) and not name.endswith(copies)


@pytest.mark.parametrize(
    ("family", "layers", "num_ranks"),
    [
        ("deepseek_v3", 2, 1),
        ("glm4_moe", 2, 2),
        pytest.param("glm4_moe_lite", 2, 2, marks=pytest.mark.full),
        pytest.param("deepseek_v32", 2, 2, marks=pytest.mark.full),
        pytest.param("glm_moe_dsa", 2, 2, marks=pytest.mark.full),
        pytest.param("hy_v3", 2, 2, marks=pytest.mark.full),
        ("qwen3_next", 4, 1),
        pytest.param("qwen3_5", 4, 2, marks=pytest.mark.full),
        pytest.param("qwen3_5_moe", 4, 1, marks=pytest.mark.full),
        pytest.param("qwen3_5_wrapped", 4, 1, marks=pytest.mark.full),
        pytest.param("qwen3_5_moe_wrapped", 4, 2, marks=pytest.mark.full),
    ],
)
def test_every_transport_brings_the_trained_layers_to_the_draft_model(tmp_path, family, layers, num_ranks):
    models = [tmp_path / "first", tmp_path / "second"]
    for seed, path in enumerate(models):
        write_toy(family, path, ToySize(layers=layers, mtp_layers=1), seed)
    checkpoints = [text_tensors(path) for path in models]
    drafted = [name for name in checkpoints[0] if held_by_drafts(name, layers)]
    expected = [
        {name: fingerprint(tensors[name] if name.endswith("_bias") else tensors[name].bfloat16()) for name in drafted}
        for tensors in checkpoints
    ]
    rollout = RolloutConfig(
        engine_tp=num_ranks, max_trajectory_tokens=128, startup_timeout_s=200, max_concurrency_per_engine=4,
        speculative=SpeculativeConfig(mode=DraftMode.mtp), env={"PYTHONPATH": plugin_folder(tmp_path / "plugin")},
        sglang={"max_total_tokens": 1024},
    )  # fmt: skip
    server = EngineServer(0, rollout, models[0], tmp_path / "engine.log", precision=Precision.bf16, cuda=False, key=KEY)
    try:
        server.wait_ready()
        engine = SglangControl("engine 0", server.url, timeout_s=TIMEOUT_S, key=KEY)
        assert engine.draft_fingerprints(drafted) == expected[0]
        engine.close()
        (outcomes,) = run_ranks(
            send_over_each_transport, 1, server.url, num_ranks, models, drafted, tmp_path / "run", timeout_s=200
        )
    finally:
        server.stop()
    copies = [name for name in checkpoints[0] if name.startswith(f"model.layers.{layers}.") and name not in drafted]
    for version, (mismatching, compared, prints) in enumerate(outcomes, start=1):
        assert mismatching == (), VERSIONS[version - 1]
        assert compared == len(checkpoints[0]) - len(copies)
        assert prints == expected[version % 2], VERSIONS[version - 1]
