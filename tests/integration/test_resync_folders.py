"""Versions through shared memory and through folders from two trainer ranks into a real SGLang engine of two."""

import os
import zlib
from pathlib import Path

import pytest
import torch
from engine_probes import KEY, serves
from ranks import run_ranks
from slimrl_tools.toy.toy import ToySize, write_toy
from weight_sender import WeightSender

from slimrl.checkpoints.versions.manifest import read_manifest
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.resync import DeltaEncoding, ResyncConfig, TransportName, VerifyMode
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.config.schema.trainer import ParallelConfig
from slimrl.engines.servers.control import SglangControl
from slimrl.engines.servers.server import EngineServer
from slimrl.resync.session import ResyncSession
from slimrl.trainer.checkpointing.export import export_hf

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
    sender = WeightSender(rank, world_size, port, model_dir, ParallelConfig(expert=2))
    sender.load(model_dir)
    engine = DamagingControl("engine 0", url, timeout_s=TIMEOUT_S, num_ranks=2, key=KEY)
    seen, version = [], 0
    for transport, encoding, count in (
        (TransportName.ipc, DeltaEncoding.xor, 1),
        (TransportName.disk, DeltaEncoding.xor, 1),
        (TransportName.delta, DeltaEncoding.xor, 2),
        (TransportName.delta, DeltaEncoding.overwrite, 4),
    ):
        config = ResyncConfig(
            transport=transport, bucket_bytes=200_000, verify=VerifyMode.full, timeout_s=TIMEOUT_S,
            dir=str(tmp_path / "versions"), local_dir=str(tmp_path / "local"), delta_encoding=encoding, keep=1,
        )  # fmt: skip
        run_id = f"{transport.value}-{encoding.value}"
        session = ResyncSession(sender.source, [engine], config, rank=rank, run_id=run_id, model_dir=model_dir)
        for index in range(count):
            version += 1
            change(sender.chunks, version)
            engine.armed = rank == 0 and index == 2
            report = session.run(version)
            folder = tmp_path / "versions" / run_id / f"v{version:06d}"
            if transport is TransportName.ipc:
                folder = tmp_path / "exported"
                export_hf(sender.source, model_dir, folder)
            if rank == 0:
                assert (report.mismatching, report.failed_engines) == ((), {}), report
                assert report.verified_tensors > 0
                assert engine.version() == version
                local = tmp_path / "local" / run_id / "engine_0" / "checkpoint"
                assert serves(url, local if transport is TransportName.delta else folder)
                if transport is not TransportName.ipc:
                    manifest = read_manifest(folder)
                    seen.append((version, transport.value, manifest.base is None, manifest.nbytes))
        session.close()
    sender.close()
    return seen


@pytest.mark.full
def test_an_engine_of_two_serves_what_was_sent_and_a_delta_that_was_cut_short_is_sent_whole(tmp_path):
    model_dir = tmp_path / "model"
    write_toy("qwen3_moe", model_dir, ToySize(init_std=0.1), seed=0)
    rollout = RolloutConfig(engine_tp=2, max_trajectory_tokens=128, sglang={"max_total_tokens": 4096})
    server = EngineServer(0, rollout, model_dir, tmp_path / "engine.log", precision=Precision.fp32, key=KEY)
    try:
        server.wait_ready()
        seen, other = run_ranks(send_versions, 2, server.url, model_dir, tmp_path, timeout_s=200)
    finally:
        server.stop()
    assert other == []
    assert [entry[:3] for entry in seen] == [
        (2, "disk", True),
        (3, "delta", True),
        (4, "delta", False),
        (5, "delta", True),
        (6, "delta", False),
        (7, "delta", True),
        (8, "delta", False),
    ]
    sizes = {version: nbytes for version, _, _, nbytes in seen}
    assert max(sizes[4], sizes[6], sizes[8]) < 0.3 * min(sizes[2], sizes[3], sizes[5], sizes[7])
