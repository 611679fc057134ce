"""A broadcast whose other member never comes: an error at the deadline, and a GPU that still works."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from lost_member import broadcast_to_nobody, check, group_of_two
from machine import choose, on_gpu
from ranks import run_ranks

from slimrl.resync.ipc.broadcast_group import BroadcastGroup, serve_store


def wait_for_nobody(rank, num_ranks, port, deadline_s):
    if on_gpu():
        torch.cuda.set_device(0)
    store = serve_store("127.0.0.1", 2, 60.0)
    spec = group_of_two(store.port)
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(BroadcastGroup, spec, 1)
        group = BroadcastGroup(spec, 0, store)
        other = joined.result(30)
    found = broadcast_to_nobody(group, deadline_s)
    other.drop()
    return found


@pytest.mark.proves("a member that never comes is one failed broadcast: no kernel begins, and the process lives")
def test_a_broadcast_without_its_other_member_is_an_error_and_the_gpu_goes_on(figure):
    deadline_s = choose(5.0, 1.0)
    (found,) = run_ranks(wait_for_nobody, 1, deadline_s, timeout_s=90)
    figure(check(found, deadline_s))
