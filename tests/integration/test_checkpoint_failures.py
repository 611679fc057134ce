"""A rank that cannot write its part of a checkpoint: all ranks learn why, none waits for it, and the next one is whole.

The files that cannot be written are links to /dev/full.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import run_ranks
from slimrl_tools.toy.toy import ToySize, write_toy
from trainer_cases import trainer_config

from slimrl.base.errors import NotWritten
from slimrl.checkpoints.digests import differences
from slimrl.trainer.checkpointing.writing import CheckpointWriting
from slimrl.trainer.worker import TrainerWorker

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

FULL = "[Errno 28] No space left on device"
WORKER = f"Worker failure: An error is caught while starting worker 0, error: {FULL}"
"""Megatron-core's words"""


def fill(*names: str) -> Callable[[Path, Path], None]:
    def fault(partial: Path, final: Path) -> None:
        for name in names:
            (partial / name).symlink_to("/dev/full")

    return fault


def block_rename(partial: Path, final: Path) -> None:
    (final / "file").mkdir(parents=True)


BEFORE_WRITING = {
    "rng": (fill("rng/00001.pt"), f"rank 1: {FULL}"),
    "shard": (fill("__1_0.distcp"), f"rank 1: {WORKER}"),
    "all": (
        fill(".metadata.tmp", "rng/00000.pt", "rng/00001.pt", "__0_0.distcp", "__1_0.distcp"),
        f"rank 0 and 1 more: {WORKER}",
    ),
    "metadata": (fill(".metadata.tmp"), f"rank 0: {FULL}"),
    "rename": (block_rename, "rank 0: [Errno 39] Directory not empty: 'PARTIAL' -> 'FINAL'"),
}
"""What keeps a rank from writing, and what all ranks say"""


def said_of_faults(rank: int, world_size: int, port: int, hf: Path, out: Path):
    """What the rank raised by the fault, and what differs in a checkpoint that was written after all of them."""
    worker = TrainerWorker(
        trainer_config(world_size), hf, seed=0, rank=rank, world_size=world_size,
        meeting=f"tcp://127.0.0.1:{port}", total_updates=10,
    )  # fmt: skip
    worker.load_hf()
    said = {}
    for name, (fault, _) in BEFORE_WRITING.items():
        final = out / name
        partial = out / f".{name}.partial"
        writing = worker.begin_checkpoint(final, same_layout=True)
        if rank == 0:
            fault(partial, final)
        dist.barrier()
        said[name] = str(failure_of(writing)).replace(str(partial), "PARTIAL").replace(str(final), "FINAL")
    # Rank 1 makes the folder of its node, and there is a file in its way.
    (out / "file").touch()
    folder = out / "of rank 0" if rank == 0 else out / "file" / "of rank 1"
    with pytest.raises(NotWritten) as caught:
        worker.begin_checkpoint(folder, leads=True)
    said["folder"] = str(caught.value)
    whole = differences(out / "whole", worker.save_checkpoint(out / "whole"), contents=True)
    worker.close()
    return said, whole


def failure_of(writing: CheckpointWriting) -> NotWritten:
    writing.write()
    with pytest.raises(NotWritten) as caught:
        writing.finish()
    return caught.value


def test_all_ranks_raise_what_one_of_them_met(tmp_path: Path):
    write_toy("qwen3_moe", tmp_path / "hf", ToySize(layers=2, hidden=64, moe_intermediate=64), 0)
    expected = {name: text for name, (_, text) in BEFORE_WRITING.items()}
    expected["folder"] = f"rank 1: [Errno 20] Not a directory: '{tmp_path / 'file' / '.of rank 1.partial' / 'rng'}'"
    for said, whole in run_ranks(said_of_faults, 2, tmp_path / "hf", tmp_path, timeout_s=120):
        assert said == expected
        assert whole == []
    assert not (tmp_path / "rng").exists()
