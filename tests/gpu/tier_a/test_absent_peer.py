"""A broadcast whose other member never comes: an error at the deadline, and a GPU that still works."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from machine import choose, on_gpu
from ranks import run_ranks

from slimrl import device
from slimrl.data.weights import GroupSpec
from slimrl.ipc.broadcast_group import BroadcastGroup, GroupError, serve_store

DEADLINE_S = 5.0
GRACE_S = 10.0
"""For an error after the deadline, or after the member has left."""


def wait_for_nobody(rank, num_ranks, port, ready, deadline_s):
    """(error of the broadcast, seconds until it came, whether it needed `drop`, seconds of a synchronisation).

    Args:
        ready: the other member says over gloo that it is there, and then begins no broadcast.
    """
    if on_gpu():
        torch.cuda.set_device(0)
    store = serve_store("127.0.0.1", 2, 60.0)
    spec = GroupSpec(
        name="absent", address="127.0.0.1", port=store.port, world_size=2, backend=device.collective_backend(),
        bucket_bytes=1 << 20, timeout_s=60.0,
    )  # fmt: skip
    data = torch.ones(1 << 20, dtype=torch.uint8, device=device.compute_device())
    device.finish_queued_work()
    raised: list[tuple[str, float]] = []

    def send():
        if on_gpu():
            torch.cuda.set_device(0)
        start = time.monotonic()
        try:
            group.broadcast(data, deadline=start + deadline_s)
        except GroupError as error:
            raised.append((str(error), time.monotonic() - start))

    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(BroadcastGroup, spec, 1)
        group = BroadcastGroup(spec, 0, store)
        other = joined.result(30)
        sending = threading.Thread(target=send, daemon=True)
        sending.start()
        if ready:
            there = pool.submit(ready_alone, other, deadline_s)
            there.result(deadline_s + GRACE_S)
        sending.join(deadline_s + GRACE_S)
        needed_drop = sending.is_alive()
        group.drop()
        other.drop()
        sending.join(GRACE_S)
    start = time.monotonic()
    if on_gpu():
        torch.cuda.synchronize()
    assert int(data.sum(dtype=torch.int64)) == 1 << 20
    return raised, needed_drop, time.monotonic() - start


def ready_alone(member: BroadcastGroup, deadline_s: float) -> None:
    """The first half of a broadcast between GPUs; without them the sender does not ask for it."""
    try:
        member._over_gloo("allreduce", torch.zeros(1), time.monotonic() + deadline_s)
    except GroupError:
        assert not on_gpu()


@pytest.mark.proves("a member that is gone is one failed broadcast: the process lives and no kernel is left running")
@pytest.mark.parametrize("ready", [False, True], ids=["never there", "gone after it was there"])
def test_a_broadcast_without_its_other_member_is_an_error_and_the_gpu_goes_on(ready, figure):
    deadline_s = choose(DEADLINE_S, 1.0)
    ((raised, needed_drop, synchronised_s),) = run_ranks(wait_for_nobody, 1, ready, deadline_s, timeout_s=90)
    assert synchronised_s < 5
    ((error, seconds),) = raised
    assert error.startswith("broadcast: ")
    assert seconds > 0.5 * deadline_s
    figure(f"error after {seconds:.1f} s" + (", when the member left" if needed_drop else ", at the deadline"))
