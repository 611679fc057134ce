"""Two ranks, one staging buffer: while the leader's stream still reads a bucket, nobody writes the next one over it."""

import pytest
import torch
import torch.distributed as dist
from machine import choose, cycles_per_s, on_gpu, spin
from ranks import run_ranks

from slimrl import device
from slimrl.data.model_weights import SourcePiece, TensorSpec
from slimrl.resync.buckets import rows_of
from slimrl.resync.pipeline import Pipeline
from slimrl.resync.plan import plan_resync
from slimrl.resync.ranks import Ranks
from slimrl.resync.report import Clock

NUM_TENSORS, COLUMNS = 6, 64
TIMEOUT_S = 60.0
SPIN_S = 0.5


class HalfSource:
    """Each of two ranks holds half of the rows of every tensor."""

    def __init__(self, rank: int, rows: int) -> None:
        self._rank, self._rows = rank, rows

    def layout(self):
        halves = (slice(0, self._rows // 2), slice(self._rows // 2, self._rows))
        pieces = tuple(
            SourcePiece(region=(half, slice(0, COLUMNS)), holders=(rank,)) for rank, half in enumerate(halves)
        )
        return {
            TensorSpec(name=f"w{i}", shape=(self._rows, COLUMNS), dtype="float32"): pieces for i in range(NUM_TENSORS)
        }

    def groups(self, name):
        shape = (1, self._rows // 2, COLUMNS)
        value = expected(name, self._rank)
        return torch.full(shape, value, device=device.compute_device())


def expected(name: str, rank: int) -> float:
    return 10.0 * int(name.removeprefix("w")) + rank


class LateCopy:
    """Implements Transform: the stream is busy for a while before it copies the staging buffer."""

    row_multiple = 1

    def changes(self, spec):
        return True

    def outputs(self, part):
        return [rows_of(part.spec, part.start, part.stop)]

    def output_regions(self, spec, region):
        return None

    def apply(self, bucket, gathered, sent, places=None):
        spin(choose(SPIN_S, 0.02))
        sent[: bucket.sent_bytes].copy_(gathered[: bucket.gathered_bytes], non_blocking=True)


def sent_halves(rank, num_ranks, port, rows):
    """On rank 0, the values of each half of every tensor as they were sent."""
    if on_gpu():
        # Both on one GPU, which NCCL would refuse.
        torch.cuda.set_device(0)
        cycles_per_s()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks)
    source, ranks, seen = HalfSource(rank, rows), Ranks("", TIMEOUT_S), {}
    plan = plan_resync(source.layout(), ranks.nodes, bucket_bytes=rows * COLUMNS * 4, transform=LateCopy())
    assert len(plan.buckets) == NUM_TENSORS
    pipeline = Pipeline(plan, source, ranks, run_id="gpu_suite", timeout_s=TIMEOUT_S)

    def send(parts, buffer):
        for part in parts:
            # As another process reads it, after the segment was handed over.
            buffer.segment()
            halves = part.view(buffer.tensor).cpu().unflatten(0, (2, -1)).flatten(1)
            seen[part.spec.name] = [sorted(set(half.tolist())) for half in halves]

    def sync_errors(place, error):
        assert error is None
        assert ranks.agree(0) == 0

    def unrecorded(place, value, results):
        """Hashing would wait for the stream too."""

    pipeline.run(send if rank == 0 else None, sync_errors, Clock(), None, unrecorded)
    pipeline.close()
    ranks.close()
    dist.destroy_process_group()
    return seen


@pytest.mark.proves("ranks agree on a bucket only after the leader's stream has read the staging buffer")
def test_a_staging_buffer_is_written_again_only_after_the_leader_has_read_it():
    seen, nothing = run_ranks(sent_halves, 2, choose(1 << 18, 64), timeout_s=120)
    assert nothing == {}
    names = [f"w{i}" for i in range(NUM_TENSORS)]
    assert seen == {name: [[expected(name, rank)] for rank in (0, 1)] for name in names}
