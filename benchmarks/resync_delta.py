"""Versions through folders, whole and as deltas, of weights that an optimizer really changes.

1. A random Qwen3-MoE of the stated size is trained in this process, by Megatron's Adam, on random tokens of which every
   expert gets some.
2. After every update the weights go out as a version three times: whole (`disk`), and as a delta in each encoding.
   Written are one shared folder per way; a delta is applied to a copy on the node's disk.
3. Seconds are those from the start of the version until the folder, or the copy, is ready to be reloaded: the reload
   itself is the same for all. The first version, which is whole for all of them, is not counted.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from slimrl.config.schema import (
    DeltaEncoding,
    OptimizerConfig,
    ParallelConfig,
    PauseMode,
    Precision,
    ResyncConfig,
    TrainerConfig,
    TransportName,
    VerifyMode,
)
from slimrl.data.packing import MicroBatch, PackedSequence, pack
from slimrl.data.protocols import EngineControl, EnginePlace
from slimrl.models.sized_toy import sized_config, write_sized_toy
from slimrl.models.versions.local_copy import LocalCopy
from slimrl.models.versions.manifest import read_manifest
from slimrl.resync.session import ResyncSession
from slimrl.rollout.ports import free_port
from slimrl.trainer.objectives import sft_objective
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
    """The part of an engine that comes before a reload: the folder, or the copy on its node, is ready to be read."""

    name, num_ranks = "engine 0", 1
    place = EnginePlace(name="engine 0", nodes=("",))

    def load_version(self, folder: str, local_dir: str | None) -> None:
        if local_dir is not None:
            with LocalCopy(Path(local_dir)).at(Path(folder), TIMEOUT_S):
                pass

    def pause(self, mode: PauseMode) -> None:
        """Nothing runs."""

    def flush_cache(self) -> None:
        """Nothing is cached."""

    def set_version(self, version: int) -> None:
        """Nothing is served."""

    def resume(self) -> None:
        """Nothing waits."""


def measure_updates(precision: Precision, nbytes: int, updates: int, folder: Path) -> dict[str, Any]:
    """Train `updates` times and send every result each way.

    Args:
        nbytes: of the weights, about.
        folder: for everything that is written: some ten times `nbytes`.

    Returns:
        `weight_bytes`; `changed_fraction` of the elements and, for each of WAYS, `bytes` of the version's files,
        `seconds` and `stage_seconds`: one entry per update.
    """
    dtype = "bfloat16" if precision is Precision.bf16 else "float32"
    model = folder / "model"
    weight_bytes = write_sized_toy(sized_config("qwen3_moe", nbytes, dtype, ParallelConfig()), model, seed=0)
    trainer = TrainerConfig(
        precision=precision,
        max_tokens_per_rank=SEQUENCES * TOKENS,
        optimizer=OptimizerConfig(lr=LEARNING_RATE),
    )
    worker = TrainerWorker(
        trainer, model, seed=0, rank=0, world_size=1, master_addr="127.0.0.1", master_port=free_port(),
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
            worker.train_update(_batch(version), sft_objective(), denominator=SEQUENCES * TOKENS, temperature=1.0)
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
    sequences = [
        PackedSequence(
            tokens=random.integers(0, 2048, TOKENS),
            loss_mask=np.ones(TOKENS, dtype=bool),
            rollout_logprobs=np.zeros(TOKENS, dtype=np.float32),
            trajectory=index,
        )
        for index in range(SEQUENCES)
    ]
    budget = SEQUENCES * TOKENS
    (batch,) = pack(sequences, np.ones(SEQUENCES, dtype=np.float32), budget_tokens=budget, alignment=1, data_parallel=1)
    return batch


def print_table(precision: Precision, figures: dict[str, Any]) -> None:
    changed = statistics.median(figures["changed_fraction"])
    title = f"{precision.value}, {figures['weight_bytes'] / 1e9:.2f} GB, {changed:.2%} of the elements changed"
    table = Table(title=title)
    for column in ("way", "MB", "of whole", "s", "of whole", "gather s", "send s", "activate s"):
        table.add_column(column, justify="left" if column == "way" else "right", no_wrap=True)
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
    if options.json is not None:
        machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "system": platform.platform()}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({**figures, "machine": machine}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
