"""A message that ends in an error because the group's other member takes no part in it."""

import threading
import time

import torch
from machine import on_gpu

from slimrl import device
from slimrl.data.model_weights import GroupSpec
from slimrl.resync.p2p.peer_group import GroupError, Move, PeerGroup

NBYTES = 1 << 20
GRACE_S = 10.0
"""For an error after the deadline, or after this member has left."""


def group_of_two(port: int) -> GroupSpec:
    return GroupSpec(
        name="absent", address="127.0.0.1", port=port, world_size=2, backend=device.collective_backend(),
        timeout_s=60.0,
    )  # fmt: skip


def send(group: PeerGroup, data: torch.Tensor, deadline: float) -> None:
    """Send to member 1 as a trainer rank does."""
    announced = group.tell([1], [[data.numel()]], deadline)
    group.told([1], 1, deadline)
    announced.wait()
    group.start([Move(1, data, sends=True)], deadline).wait()


def send_to_nobody(group: PeerGroup, deadline_s: float) -> tuple[str, float, bool, float]:
    """(the error, seconds until it came, whether it came only as the group was dropped, seconds of a synchronisation).

    The group is dropped, and the GPU computes afterwards.
    """
    data = torch.ones(NBYTES, dtype=torch.uint8, device=device.compute_device())
    device.finish_queued_work()
    raised: list[tuple[str, float]] = []
    start, current = time.monotonic(), device.compute_device()

    def try_to_send():
        if on_gpu():
            torch.cuda.set_device(current)
        try:
            send(group, data, start + deadline_s)
        except GroupError as error:
            raised.append((str(error), time.monotonic() - start))

    sending = threading.Thread(target=try_to_send, daemon=True)
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
    """What `send_to_nobody` has to find, in words for the table."""
    error, seconds, needed_drop, synchronised_s = found
    assert error.startswith("message ")
    assert 0.5 * deadline_s < seconds
    assert synchronised_s < 5
    return f"error after {seconds:.1f} s" + (", when this member left" if needed_drop else ", at the deadline")
