"""Buffers of a resync that cannot be made: an error, and nothing left of those that were."""

import pytest
import torch
from resync_engines import MemoryTransport, Source, config, session, weights

from slimrl import device
from slimrl.quantization.fp8 import BlockFp8
from slimrl.resync import pipeline
from slimrl.resync.ipc.shared_buffer import SHARED_MEMORY_DIR, CudaBuffer
from slimrl.resync.pipeline import Pipeline
from slimrl.resync.plan import plan_resync
from slimrl.resync.ranks import RankError, Ranks
from slimrl.resync.report import ResyncError
from slimrl.resync.transform import Quantize

pytestmark = pytest.mark.skipif(device.device_type() == "cuda", reason="counts files in /dev/shm")

RUN_ID = "no_memory"
NUM_BUFFERS = 3
"""Buffers of rank 0 where it quantises: a staging buffer and two slots"""
NUM_EXCHANGES = 3
"""Whether each rank got its staging buffer; where to map it; whether each rank got its slots"""


def make_pipeline(ranks: Ranks) -> Pipeline:
    source = Source({"w": torch.ones(32, 16)})
    transform = Quantize(BlockFp8(block=(16, 16)), ["w"])
    plan = plan_resync(source.layout(), ranks.nodes, bucket_bytes=1 << 12, transform=transform)
    return Pipeline(plan, source, ranks, run_id=RUN_ID, timeout_s=1.0)


def files() -> list[str]:
    return [path.name for path in SHARED_MEMORY_DIR.glob(f"slimrl-{RUN_ID}-*")]


def nth(number: int, function, error: Exception):
    """The function, whose call of this number raises."""
    calls = []

    def call(*arguments):
        calls.append(arguments)
        if len(calls) == number:
            raise error
        return function(*arguments)

    return call


@pytest.mark.parametrize("number", range(1, NUM_BUFFERS + 1))
def test_a_buffer_that_cannot_be_made_leaves_none_of_the_others(monkeypatch, number):
    make = nth(number, pipeline.shared_buffer, OSError("no room"))
    monkeypatch.setattr(pipeline, "shared_buffer", make)
    with pytest.raises(OSError, match=r"rank 0: . buckets of .* bytes: no room"):
        make_pipeline(Ranks("", 1.0))
    assert files() == []


@pytest.mark.parametrize("number", range(1, NUM_EXCHANGES + 1))
def test_a_rank_that_dies_meanwhile_leaves_no_buffer_of_this_one(monkeypatch, number):
    ranks = Ranks("", 1.0)
    monkeypatch.setattr(ranks, "gather_objects", nth(number, ranks.gather_objects, RankError("dead")))
    with pytest.raises(RankError, match="dead"):
        make_pipeline(ranks)
    assert files() == []


def test_the_counts_above_are_those_of_a_pipeline_that_is_made(monkeypatch):
    ranks = Ranks("", 1.0)
    monkeypatch.setattr(ranks, "gather_objects", nth(NUM_EXCHANGES + 1, ranks.gather_objects, RankError("one more")))
    pipeline = make_pipeline(ranks)
    assert len(files()) == NUM_BUFFERS
    pipeline.close()
    assert files() == []


def test_a_gpu_without_room_is_reported_as_a_full_shared_memory_is(monkeypatch):
    def empty(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    resync = session(Source(weights()), [], config(), run_id=RUN_ID, transport=MemoryTransport())
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(pipeline, "shared_buffer", lambda nbytes, name, where: CudaBuffer(nbytes, where))
    with pytest.raises(ResyncError, match=r"rank 0: 2 buckets of .* bytes: .*CUDA out of memory"):
        resync.run(1)
    monkeypatch.undo()
    resync.close()
