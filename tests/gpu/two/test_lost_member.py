"""A member that goes away between two GPUs: an error at the deadline, and a GPU that still works.

NCCL's kernel runs by then, for which the members must have been connected by a message before: one that is lost while
NCCL connects keeps the other one waiting without a deadline.
"""

import time

import pytest
import torch
import torch.distributed as dist
from lost_member import NBYTES, check, group_of_two, send, send_to_nobody
from machine import choose, on_gpu
from ranks import run_ranks

from slimrl import device
from slimrl.resync.p2p.peer_group import GroupError, Move, PeerGroup


def send_twice(rank, num_ranks, port, deadline_s):
    """Rank 1 receives the first message. For the second it is ready, as it says over gloo, and then begins nothing."""
    if on_gpu():
        torch.cuda.set_device(rank)
    # Of rank 0, as long as this runs.
    store = dist.TCPStore("127.0.0.1", port, None, is_master=rank == 0, wait_for_workers=False)
    group = PeerGroup(group_of_two(port), rank)
    data = torch.full((NBYTES,), 3 if rank == 0 else 0, dtype=torch.uint8, device=device.compute_device())
    device.finish_queued_work()
    deadline = time.monotonic() + 60
    if rank == 0:
        send(group, data, deadline)
        return send_to_nobody(group, deadline_s)
    for receives in (True, False):
        assert group.told([0], 1, deadline) == [[NBYTES]]
        group.tell([0], [[1]], deadline).wait()
        if receives:
            group.start([Move(0, data, sends=False)], deadline).wait()
            assert int(data.min()) == int(data.max()) == 3
    # Until the sender leaves.
    with pytest.raises(GroupError):
        group.told([0], 1, deadline)
    group.drop()
    del store
    return None


@pytest.mark.proves("a member that is gone is one failed message: the process lives and no kernel is left running")
def test_a_message_whose_other_member_goes_away_is_an_error_and_the_gpu_goes_on(figure):
    deadline_s = choose(5.0, 1.0)
    found, _ = run_ranks(send_twice, 2, deadline_s, timeout_s=120)
    figure(check(found, deadline_s))
