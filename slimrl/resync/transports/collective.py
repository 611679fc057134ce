"""Transport by broadcast (NCCL or gloo) from trainer rank 0 to all engine processes, on any node.

The group is set up once: rank 0 is the trainer, the engines' tensor-parallel processes follow one after the other.
The trainer's end is a bare process-group object: torch's default group, which spans the trainer alone, has no place
for processes outside it. The keys under which the two ends meet are those that torch.distributed derives from a group
name when SGLang joins through a `tcp://` address.
"""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slimrl import device
from slimrl.data.protocols import BucketSpec, EngineControl, EngineError
from slimrl.resync.fan_out import fan_out

LEAVE_TIMEOUT_S = 5.0
"""How long `close` waits for the engines to leave the group."""

_DEVICE_OF_BACKEND = {"gloo": "cpu", "nccl": "cuda"}


class CollectiveTransport:
    """Implements Transport.

    Args:
        address: of the trainer's rank 0 as the engines reach it.
        group: name of the group, unique among the runs that share an engine.
        timeout_s: deadline of joining, and of one bucket.
    """

    def __init__(self, engines: Sequence[EngineControl], address: str, group: str, timeout_s: float) -> None:
        self._engines = engines
        self._address = address
        self._group_name = group
        self._timeout_s = timeout_s
        self._group: Any = None
        self._buffer: Tensor | None = None

    def open(self, nbytes: int) -> Tensor:
        assert self._group is None, "opened twice"
        backend = device.collective_backend()
        *first_ranks, world_size = accumulate((engine.num_ranks for engine in self._engines), initial=1)
        timeout = timedelta(seconds=self._timeout_s)
        store = dist.TCPStore(
            self._address, 0, world_size, is_master=True, timeout=timeout, wait_for_workers=False, multi_tenant=True
        )
        calls: dict[str, Callable[[], Any]] = {
            engine.name: partial(
                engine.join_group,
                self._address,
                store.port,
                first_rank,
                world_size,
                self._group_name,
                backend,
            )
            for engine, first_rank in zip(self._engines, first_ranks, strict=True)
        }
        calls["trainer"] = partial(_join, store, world_size, self._group_name, backend, timeout)
        self._group = fan_out(calls, "join_group", self._timeout_s)["trainer"]
        self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=device.compute_device())
        return self._buffer

    def send(self, bucket: BucketSpec) -> None:
        """Returns once the broadcast is done and every engine has loaded what it received."""
        assert self._group is not None, "not open"
        assert self._buffer is not None
        options = dist.BroadcastOptions()
        options.rootRank = 0
        work = self._group.broadcast([self._buffer[: bucket.nbytes]], options)
        calls = {engine.name: partial(engine.receive_bucket, self._group_name, bucket) for engine in self._engines}
        # The engines' answers first: one that refuses says why, whereas the broadcast would only run out of time.
        fan_out(calls, "receive_bucket", self._timeout_s)
        work.wait(timedelta(seconds=self._timeout_s))
        if self._buffer.is_cuda:
            torch.cuda.synchronize()

    def close(self) -> None:
        if self._group is None:
            return
        last_reference = [self._group]
        self._group, self._buffer = None, None
        # gloo's destructor waits until a broadcast that broke off is out of time; a thread of its own can afford that.
        threading.Thread(target=last_reference.clear, name="drop-group", daemon=True).start()
        calls = {engine.name: partial(engine.leave_group, self._group_name) for engine in self._engines}
        try:
            fan_out(calls, "leave_group", LEAVE_TIMEOUT_S)
        except EngineError:
            # An engine that is gone has left the group; one that still waits for a broadcast is about to be ended.
            return


def _join(store: Any, world_size: int, group: str, backend: str, timeout: timedelta) -> Any:
    """Rank 0's end; returns when all others have joined (gloo), or at the first broadcast at the latest (NCCL)."""
    keys = dist.PrefixStore(group, store)
    keys = dist.PrefixStore(f"{group}/", keys)
    keys = dist.PrefixStore(f"{_DEVICE_OF_BACKEND[backend]}/", keys)
    if backend == "gloo":
        return dist.ProcessGroupGloo(keys, 0, world_size, timeout=timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(keys, 0, world_size, options)
