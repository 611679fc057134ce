"""A member that goes away between two GPUs: an error at the deadline, and a GPU that still works.

NCCL's kernel runs by then, for which the members must have been connected by a broadcast before: one that is lost while
NCCL connects keeps the other one waiting without a deadline.
"""

import contextlib
import time

import pytest
import torch
import torch.distributed as dist
from lost_member import NBYTES, broadcast_to_nobody, check, group_of_two
from machine import choose, on_gpu
from ranks import run_ranks

from slimrl import device
from slimrl.resync.ipc.broadcast_group import BroadcastGroup, GroupError


def send_twice(rank, num_ranks, port, deadline_s):
    """Rank 1 takes part in the first broadcast. For the second it is there, as it says over gloo, and then begins none;
    without a GPU the sender does not ask for that.
    """
    if on_gpu():
        torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, wait_for_workers=False)
    group = BroadcastGroup(group_of_two(port), rank, store)
    data = torch.full((NBYTES,), 3 if rank == 0 else 0, dtype=torch.uint8, device=device.compute_device())
    device.finish_queued_work()
    group.broadcast(data)
    assert int(data.min()) == int(data.max()) == 3
    if rank == 0:
        return broadcast_to_nobody(group, deadline_s)
    with contextlib.nullcontext() if on_gpu() else pytest.raises(GroupError):
        group._over_gloo("allreduce", torch.zeros(1), time.monotonic() + deadline_s)
    # Until the sender leaves.
    with pytest.raises(GroupError):
        group.announced()
    group.drop()
    return None


@pytest.mark.proves("a member that is gone is one failed broadcast: the process lives and no kernel is left running")
def test_a_broadcast_whose_other_member_goes_away_is_an_error_and_the_gpu_goes_on(figure):
    deadline_s = choose(5.0, 1.0)
    found, _ = run_ranks(send_twice, 2, deadline_s, timeout_s=120)
    figure(check(found, deadline_s))
