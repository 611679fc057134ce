"""Whole versions and deltas, through folders, of weights that an optimizer has updated.

1. Megatron's Adam trains a random Qwen3-MoE of the stated size in this process, on random tokens that reach every
   expert.
2. After every update the weights are written as three versions, each in its own folder: whole (`disk`), and as a delta
   in each encoding. A delta is applied to a copy on the node's disk.
3. Seconds are from the start of the version until the folder or the copy is ready to be reloaded. The reload, the same
   for all, is not measured. The first version, which is always whole, is not counted.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from figures import make_table, write_figures
from rich.console import Console

from slimrl.algorithms.objective import cross_entropy
from slimrl.checkpoints.versions.local_copy import LocalCopy
from slimrl.checkpoints.versions.manifest import read_manifest
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.resync import DeltaEncoding, PauseMode, ResyncConfig, TransportName, VerifyMode
from slimrl.config.schema.trainer import OptimizerConfig, ParallelConfig, TrainerConfig
from slimrl.data.model_weights import EngineControl, EnginePlace
from slimrl.data.packing import MicroBatch, pack
from slimrl.data.trajectory import Segment
from slimrl.engines.servers.ports import free_port
from slimrl.resync.session import ResyncSession
from slimrl.toys.sized_toy import sized_config, write_sized_toy
from slimrl.trainer.worker import TrainerWorker

SEQUENCES, TOKENS = 8, 64
LEARNING_RATE = 1e-6
TIMEOUT_S = 300.0
WAYS = {
    "disk": (TransportName.disk, DeltaEncoding.xor),
    "delta xor": (TransportName.delta, DeltaEncoding.xor),
    "delta overwrite": (TransportName.delta, DeltaEncoding.overwrite),
}
"""Name -> (transport, encoding)"""


class FolderEngine:
    """An engine up to its reload: it applies deltas to the copy on its node, and reads nothing."""

    name, num_ranks = "engine 0", 1
    place = EnginePlace(name="engine 0", nodes=("",))

    def load_version(self, folder: str, local_dir: str | None) -> None:
        if local_dir is not None:
            with LocalCopy(Path(local_dir)).at(Path(folder), TIMEOUT_S):
                pass

    def pause(self, mode: PauseMode) -> None:
        """No requests run."""

    def flush_cache(self) -> None:
        """Nothing is cached."""

    def set_version(self, version: int) -> None:
        """No requests are served."""

    def resume(self) -> None:
        """No requests wait."""


def measure_updates(precision: Precision, nbytes: int, updates: int, folder: Path) -> dict[str, Any]:
    """Train `updates` times and write each result in every way.

    Args:
        nbytes: approximate size of the weights.
        folder: for all files, about ten times `nbytes`.

    Returns:
        `weight_bytes`; `changed_fraction` of the elements and, for each of WAYS, `bytes` of the version's files,
        `seconds` and `stage_seconds`: one entry per update.
    """
    model = folder / "model"
    weight_bytes = write_sized_toy(sized_config("qwen3_moe", nbytes, precision.dtype, ParallelConfig()), model, seed=0)
    trainer = TrainerConfig(
        precision=precision,
        max_tokens_per_rank=SEQUENCES * TOKENS,
        optimizer=OptimizerConfig(lr=LEARNING_RATE),
    )
    worker = TrainerWorker(
        trainer, model, seed=0, rank=0, world_size=1, meeting=f"tcp://127.0.0.1:{free_port()}",
        total_updates=updates + 1,
    )  # fmt: skip
    worker.load_hf()
    source = worker.weight_source()
    sessions = {way: _session(source, way, folder) for way in WAYS}
    figures: dict[str, Any] = {"weight_bytes": weight_bytes, "changed_fraction": []}
    figures |= {way: {"bytes": [], "seconds": [], "stage_seconds": []} for way in WAYS}
    before: dict[str, torch.Tensor] = {}
    for version in range(1, updates + 2):
        if version > 1:
            worker.runner.train_update(_batch(version), cross_entropy, denominator=SEQUENCES * TOKENS, temperature=1.0)
        now = {name: value.clone() for name, value in source.tensors() if value is not None}
        for way, session in sessions.items():
            report = session.run(version)
            assert report is not None, "this rank sends"
            version_folder = folder / way / f"{way}/v{version:06d}"
            if version > 1:
                figures[way]["bytes"].append(read_manifest(version_folder).nbytes)
                figures[way]["seconds"].append(report.seconds)
                figures[way]["stage_seconds"].append(report.stage_seconds)
        if before:
            changed = sum(int((now[name] != before[name]).sum()) for name in now)
            figures["changed_fraction"].append(changed / sum(value.numel() for value in now.values()))
        before = now
    for session in sessions.values():
        session.close()
    worker.close()
    return figures


def _session(source: Any, way: str, folder: Path) -> ResyncSession:
    transport, encoding = WAYS[way]
    config = ResyncConfig(
        transport=transport, verify=VerifyMode.off, timeout_s=TIMEOUT_S, dir=str(folder / way), keep=1,
        local_dir=str(folder / "local"), full_every=1000, delta_encoding=encoding, bucket_bytes=64 * 1024**2,
    )  # fmt: skip
    engine = cast(EngineControl, FolderEngine())
    return ResyncSession(source, [engine], config, rank=0, run_id=way, model_dir=folder / "model")


def _batch(seed: int) -> list[MicroBatch]:
    random = np.random.default_rng(seed)
    segments = [
        [Segment.not_sampled(random.integers(0, 2048, TOKENS), np.ones(TOKENS, np.bool_))] for _ in range(SEQUENCES)
    ]
    budget = SEQUENCES * TOKENS
    (batch,) = pack(segments, np.ones(SEQUENCES, dtype=np.float32), budget_tokens=budget, alignment=1, data_parallel=1)
    return batch


def print_table(precision: Precision, figures: dict[str, Any]) -> None:
    changed = statistics.median(figures["changed_fraction"])
    title = f"{precision.value}, {figures['weight_bytes'] / 1e9:.2f} GB, {changed:.2%} of the elements changed"
    table = make_table(title, ("way", "MB", "of whole", "s", "of whole", "gather s", "send s", "activate s"))
    whole = {name: statistics.median(figures["disk"][name]) for name in ("bytes", "seconds")}
    for way in WAYS:
        nbytes, seconds = (statistics.median(figures[way][name]) for name in ("bytes", "seconds"))
        stages = [
            statistics.median(each.get(stage, 0.0) for each in figures[way]["stage_seconds"])
            for stage in ("gather", "send", "activate")
        ]
        table.add_row(
            way, f"{nbytes / 1e6:.1f}", f"{nbytes / whole['bytes']:.3f}", f"{seconds:.2f}",
            f"{seconds / whole['seconds']:.2f}", *(f"{value:.2f}" for value in stages),
        )  # fmt: skip
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=0.25, help="size of the weights")
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--precision", choices=[each.value for each in Precision], default="bf16")
    parser.add_argument("--folder", type=Path, help="on the disk to write to; a temporary one if not given")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    precision = Precision(options.precision)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        figures = measure_updates(precision, int(options.gigabytes * 1e9), options.updates, Path(name))
    print_table(precision, figures)
    write_figures(options.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
