"""What a resync takes of memory besides the weights: as much for a large model as for a small one.

The trainer's ranks are real, and measured from the outside of torch: anonymous memory of the processes, and their files
in /dev/shm, which are counted once.
"""

import os
from pathlib import Path

import pytest
import torch.distributed as dist
from memory_engine import MemoryEngine
from ranks import run_ranks

from slimrl.config.schema import OptimizerConfig, ParallelConfig, Precision, ResyncConfig, TrainerConfig, VerifyMode
from slimrl.models.hf_config import read_hf_config
from slimrl.models.shared_segment import open_shared
from slimrl.models.sized_toy import sized_config, write_sized_toy
from slimrl.observability.memory import MemoryWatch
from slimrl.resync.session import ResyncSession
from slimrl.trainer.worker import TrainerWorker

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

MB = 1_000_000
BUCKET_BYTES = 8 * MB
SLACK_BYTES = 6 * MB
"""What Python and the C library's allocator take for the messages of a resync, on two ranks together."""
TIMEOUT_S = 60.0
TRAINER = TrainerConfig(
    num_ranks=2,
    parallel=ParallelConfig(expert=2),
    precision=Precision.bf16,
    max_tokens_per_rank=64,
    optimizer=OptimizerConfig(lr=1e-3),
)


class ReadingEngine(MemoryEngine):
    """Reads every byte and keeps none, so that the rank in whose process it lives takes no memory for it."""

    def begin_update(self):
        self.seen = 0

    def load_shared_bucket(self, segment, bucket):
        flat = open_shared(segment)[: bucket.nbytes]
        flat.amax()
        self.seen += bucket.nbytes


def resync_twice(rank, world_size, port, model: Path) -> tuple[int, int, int]:
    """(memory that this rank took, bytes that the engine read, bytes of the plan's buffers)."""
    worker = TrainerWorker(
        TRAINER, model, seed=0, rank=rank, world_size=world_size, master_addr="127.0.0.1", master_port=port,
        total_updates=1,
    )  # fmt: skip
    worker.load_hf()
    engine = ReadingEngine("engine 0", "")
    config = ResyncConfig(bucket_bytes=BUCKET_BYTES, verify=VerifyMode.off, timeout_s=TIMEOUT_S)
    with MemoryWatch([os.getpid()]) as memory:
        session = ResyncSession(worker.weight_source(), [engine], config, rank=rank, run_id="memory")
        reports = [session.run(version) for version in (1, 2)]
    session.close()
    dist.barrier()
    worker.close()
    return memory.extra_bytes, engine.seen if rank == 0 else 0, reports[1].peak_extra_bytes if rank == 0 else 0


def extra_bytes(folder: Path, megabytes: int) -> int:
    """Of all ranks together; the engine has read the whole model."""
    config = sized_config("qwen3_moe", megabytes * MB, "bfloat16", TRAINER.parallel)
    nbytes = write_sized_toy(config, folder / f"{megabytes}", 0)
    assert read_hf_config(folder / f"{megabytes}") == config
    results = run_ranks(resync_twice, 2, folder / f"{megabytes}", timeout_s=200)
    taken, seen, planned = (sum(values) for values in zip(*results, strict=True))
    assert seen == nbytes
    assert planned <= 2 * BUCKET_BYTES
    # What is measured holds at least the buffers themselves, or it would measure nothing.
    assert taken >= planned
    return taken


@pytest.mark.parametrize("sizes", [(64, 128), pytest.param((250, 1000), marks=pytest.mark.full)])
def test_a_resync_takes_two_buckets_whatever_the_size_of_the_model(tmp_path, sizes):
    small, large = (extra_bytes(tmp_path, size) for size in sizes)
    assert small < 2 * BUCKET_BYTES + SLACK_BYTES
    assert large < 2 * BUCKET_BYTES + SLACK_BYTES
    assert abs(large - small) < SLACK_BYTES
