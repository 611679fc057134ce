"""A broadcast that ends in an error because the group's other member takes no part in it."""

import threading
import time

import torch
from machine import on_gpu

from slimrl import device
from slimrl.data.model_weights import GroupSpec
from slimrl.resync.ipc.broadcast_group import BroadcastGroup, GroupError

NBYTES = 1 << 20
GRACE_S = 10.0
"""For an error after the deadline, or after this member has left."""


def group_of_two(port: int) -> GroupSpec:
    return GroupSpec(
        name="absent", address="127.0.0.1", port=port, world_size=2, backend=device.collective_backend(),
        bucket_bytes=NBYTES, timeout_s=60.0,
    )  # fmt: skip


def broadcast_to_nobody(group: BroadcastGroup, deadline_s: float) -> tuple[str, float, bool, float]:
    """(the error, seconds until it came, whether it came only as the group was dropped, seconds of a synchronisation).

    The group is dropped, and the GPU computes afterwards.
    """
    data = torch.ones(NBYTES, dtype=torch.uint8, device=device.compute_device())
    device.finish_queued_work()
    raised: list[tuple[str, float]] = []
    start, current = time.monotonic(), device.compute_device()

    def send():
        if on_gpu():
            torch.cuda.set_device(current)
        try:
            group.broadcast(data, deadline=start + deadline_s)
        except GroupError as error:
            raised.append((str(error), time.monotonic() - start))

    sending = threading.Thread(target=send, daemon=True)
    sending.start()
    sending.join(deadline_s + GRACE_S)
    needed_drop = sending.is_alive()
    group.drop()
    sending.join(GRACE_S)
    ((error, seconds),) = raised
    start = time.monotonic()
    if on_gpu():
        torch.cuda.synchronize()
    assert int(data.sum(dtype=torch.int64)) == NBYTES
    return error, seconds, needed_drop, time.monotonic() - start


def check(found: tuple[str, float, bool, float], deadline_s: float) -> str:
    """What `broadcast_to_nobody` has to find, in words for the table."""
    error, seconds, needed_drop, synchronised_s = found
    assert error.startswith("broadcast: ")
    assert 0.5 * deadline_s < seconds
    assert synchronised_s < 5
    return f"error after {seconds:.1f} s" + (", when this member left" if needed_drop else ", at the deadline")
