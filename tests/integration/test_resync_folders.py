"""Versions through folders (`disk`, `delta`) from two trainer ranks into a real SGLang engine of two."""

import os
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from engine_probes import serves
from ranks import run_ranks
from slimrl_tools.toy import ToySize, write_toy

from slimrl.config.schema import (
    DeltaEncoding,
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
from slimrl.models.versions.manifest import read_manifest
from slimrl.resync.session import ResyncSession
from slimrl.rollout.control import SglangControl
from slimrl.rollout.server import EngineServer
from slimrl.trainer.build import build_model
from slimrl.trainer.parallel import init_parallel
from slimrl.trainer.weight_source import MegatronWeightSource
from slimrl.trainer.weights import load_hf_weights

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

TIMEOUT_S = 60.0


class DamagingControl(SglangControl):
    """Cuts a file of the version short before the engine loads it, once, when `armed`."""

    armed = False

    def load_version(self, folder: str, local_dir: str | None) -> None:
        if self.armed:
            self.armed = False
            file = next(Path(folder).glob("*.zst"))
            os.truncate(file, file.stat().st_size - 1)
        super().load_version(folder, local_dir)


@torch.no_grad()
def change(chunks, version: int) -> None:
    """Some elements of about half of the weights; equal on ranks that hold the same."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if zlib.crc32(f"{name} {version}".encode()) % 2:
                parameter.view(-1)[:: 3 + version] *= 1.05


def send_versions(rank, world_size, port, url, model_dir, tmp_path) -> list[tuple[int, str, bool, int]]:
    """(version, transport, whole, bytes of the version's files) of each, once the engine was seen to serve it."""
    hf_config = read_hf_config(model_dir)
    parallel = ParallelConfig(expert=2)
    init_parallel(
        parallel, rank=rank, world_size=world_size, master_addr="127.0.0.1", master_port=port,
        timeout_s=TIMEOUT_S, seed=0,
    )  # fmt: skip
    trainer = TrainerConfig(
        parallel=parallel, precision=Precision.fp32, max_tokens_per_rank=64, optimizer=OptimizerConfig(lr=1e-3)
    )
    family = family_of(hf_config)
    chunks = build_model(trainer, family.megatron_config(hf_config))
    load_hf_weights(chunks, model_dir, family, hf_config)
    source = MegatronWeightSource(chunks, family, hf_config, "float32")
    engine = DamagingControl("engine 0", url, timeout_s=TIMEOUT_S, num_ranks=2)
    seen, version = [], 0
    for transport, encoding, count in (
        (TransportName.disk, DeltaEncoding.xor, 1),
        (TransportName.delta, DeltaEncoding.xor, 2),
        (TransportName.delta, DeltaEncoding.overwrite, 4),
    ):
        config = ResyncConfig(
            transport=transport, bucket_bytes=200_000, verify=VerifyMode.full, timeout_s=TIMEOUT_S,
            dir=str(tmp_path / "versions"), local_dir=str(tmp_path / "local"), delta_encoding=encoding, keep=1,
        )  # fmt: skip
        run_id = f"{transport.value}-{encoding.value}"
        session = ResyncSession(source, [engine], config, rank=rank, run_id=run_id, model_dir=model_dir)
        for index in range(count):
            version += 1
            change(chunks, version)
            engine.armed = rank == 0 and index == 2
            report = session.run(version)
            folder = tmp_path / "versions" / run_id / f"v{version:06d}"
            if rank == 0:
                assert (report.mismatching, report.failed_engines) == ((), {}), report
                assert report.verified_tensors > 0
                assert engine.version() == version
                loaded = (
                    folder
                    if transport is TransportName.disk
                    else tmp_path / "local" / run_id / "engine_0" / "checkpoint"
                )
                assert serves(url, loaded)
                manifest = read_manifest(folder)
                seen.append((version, transport.value, manifest.base is None, manifest.nbytes))
        session.close()
    dist.destroy_process_group()
    return seen


def test_an_engine_serves_what_was_sent_through_folders_and_a_delta_that_was_cut_short_is_sent_whole(tmp_path):
    model_dir = tmp_path / "model"
    write_toy("qwen3_moe", model_dir, ToySize(init_std=0.1), seed=0)
    rollout = RolloutConfig(engine_tensor=2, max_trajectory_tokens=128, sglang={"max_total_tokens": 4096})
    server = EngineServer(0, rollout, model_dir, tmp_path / "engine.log", precision=Precision.fp32)
    try:
        server.wait_ready()
        seen, other = run_ranks(send_versions, 2, server.url, model_dir, tmp_path, timeout_s=200)
    finally:
        server.stop()
    assert other == []
    assert [entry[:3] for entry in seen] == [
        (1, "disk", True),
        (2, "delta", True),
        (3, "delta", False),
        (4, "delta", True),
        (5, "delta", False),
        (6, "delta", True),
        (7, "delta", False),
    ]
    sizes = {version: nbytes for version, _, _, nbytes in seen}
    assert max(sizes[3], sizes[5], sizes[7]) < 0.3 * min(sizes[1], sizes[2], sizes[4], sizes[6])
