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

from slimrl import device
from slimrl.data.protocols import BucketSpec, EngineControl, EngineError
from slimrl.resync.fan_out import fan_out
from slimrl.resync.shared_buffer import SharedBuffer

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

    def __init__(self, address: str, group: str, timeout_s: float) -> None:
        self._address = address
        self._group_name = group
        self._timeout_s = timeout_s
        self._engines: Sequence[EngineControl] = ()
        self._attempt = 0
        self._group: Any = None

    def connect(self, engines: Sequence[EngineControl]) -> None:
        """Make the group, unless it is there, whole, and of these engines."""
        if self._group is not None and list(engines) == list(self._engines):
            return
        self.close()
        self._engines = engines
        self._attempt += 1
        backend = device.collective_backend()
        *first_ranks, world_size = accumulate((engine.num_ranks for engine in engines), initial=1)
        timeout = timedelta(seconds=self._timeout_s)
        store = dist.TCPStore(
            self._address, 0, world_size, is_master=True, timeout=timeout, wait_for_workers=False, multi_tenant=True
        )
        group = self._joined_name()
        calls: dict[str, Callable[[], Any]] = {
            engine.name: partial(engine.join_group, self._address, store.port, first_rank, world_size, group, backend)
            for engine, first_rank in zip(engines, first_ranks, strict=True)
        }
        calls["trainer"] = partial(_join, store, world_size, group, backend, timeout)
        self._group = fan_out(calls, "join_group", self._timeout_s, at_once=True)["trainer"]

    def begin(self, version: int) -> None:
        fan_out({engine.name: engine.begin_update for engine in self._engines}, "begin_update", self._timeout_s)

    def send(self, bucket: BucketSpec, buffer: SharedBuffer) -> None:
        """Returns once the broadcast is done and every engine has loaded what it received."""
        assert self._group is not None, "not connected"
        options = dist.BroadcastOptions()
        options.rootRank = 0
        work = self._group.broadcast([buffer.tensor[: bucket.nbytes]], options)
        group = self._joined_name()
        calls = {engine.name: partial(engine.receive_bucket, group, bucket) for engine in self._engines}
        try:
            # The engines' answers first: one that refuses says why, whereas the broadcast would only run out of time.
            fan_out(calls, "receive_bucket", self._timeout_s, at_once=True)
        except EngineError:
            self.close()
            raise
        work.wait(timedelta(seconds=self._timeout_s))
        if buffer.tensor.is_cuda:
            torch.cuda.synchronize()

    def end(self, version: int) -> None:
        fan_out({engine.name: engine.end_update for engine in self._engines}, "end_update", self._timeout_s)

    def close(self) -> None:
        if self._group is None:
            return
        last_reference = [self._group]
        self._group = None
        # gloo's destructor waits until a broadcast that broke off is out of time; a thread of its own can afford that.
        threading.Thread(target=last_reference.clear, name="drop-group", daemon=True).start()
        calls = {engine.name: partial(engine.leave_group, self._joined_name()) for engine in self._engines}
        try:
            fan_out(calls, "leave_group", LEAVE_TIMEOUT_S)
        except EngineError:
            # An engine that is gone has left the group; one that still waits for a broadcast is about to be ended.
            return

    def _joined_name(self) -> str:
        return f"{self._group_name}-{self._attempt}"


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
