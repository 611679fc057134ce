"""A message whose other member never comes: an error at the deadline, and a GPU that still works."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lost_member import check, group_of_two, send_to_nobody
from machine import choose, on_gpu
from ranks import run_ranks

from slimrl.resync.p2p.peer_group import PeerGroup, serve_store


class NoKernels:
    """ProcessGroupNCCL for two members on one GPU, which NCCL refuses; none of their messages may begin."""

    class Options(SimpleNamespace):
        def __init__(self):
            super().__init__(config=SimpleNamespace())

    def __init__(self, keys, member, size, options):
        """Nothing is connected."""

    def allreduce(self, tensors, options):
        return SimpleNamespace(wait=lambda limit: None)

    def _start_coalescing(self):
        raise AssertionError("a kernel begins")

    def abort(self):
        """No communicator."""


def wait_for_nobody(rank, num_ranks, port, deadline_s):
    dist.ProcessGroupNCCL = NoKernels
    if on_gpu():
        torch.cuda.set_device(0)
    store = serve_store("127.0.0.1", 60.0)
    spec = group_of_two(store.port)
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(PeerGroup, spec, 1)
        group = PeerGroup(spec, 0)
        other = joined.result(30)
    found = send_to_nobody(group, deadline_s)
    other.drop()
    return found


@pytest.mark.proves("a member that never comes is one failed message: no kernel begins, and the process lives")
def test_a_message_without_its_other_member_is_an_error_and_the_gpu_goes_on(figure):
    deadline_s = choose(5.0, 1.0)
    (found,) = run_ranks(wait_for_nobody, 1, deadline_s, timeout_s=90)
    figure(check(found, deadline_s))
