"""Transport by broadcast (NCCL or gloo) from trainer rank 0, the sender, to the engines, on any node.

A group with one receiver per engine and node is made once, and again under another name when the engines change or a
version failed. Every byte goes to each receiver once; the engine's other ranks on the node read the receiver's memory
(slimrl/engines/plugin/bucket_receiver.py).

A send returns when the broadcast is done; the engines load the bucket while the next one is broadcast.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any
from uuid import uuid4

from torch import Tensor

from slimrl import device
from slimrl.data.engine import EngineError
from slimrl.data.model_weights import EngineControl, GroupSpec, TensorPart, packed_bytes
from slimrl.resync.engine_calls import SendThread, fan_out
from slimrl.resync.ipc.broadcast_group import RECEIVER_BUFFERS, BroadcastGroup, GroupError, serve_store
from slimrl.resync.ipc.shared_buffer import SharedBuffer
from slimrl.resync.transports.base import Transport

LEAVE_TIMEOUT_S = 5.0
"""How long `close` waits for the engines to leave the group."""

LOADS_END_S = 1.0
"""Seconds that a load's thread has to end, after the load's own deadline."""


class CollectiveTransport(Transport):
    """
    Args:
        address: of the trainer's rank 0 as the engines reach it.
        name: of the run, part of the group's name in logs.
        timeout_s: deadline of each call, however many broadcasts it takes.
        bucket_bytes: of the largest bucket that will be sent.
    """

    def __init__(self, address: str, name: str, timeout_s: float, *, bucket_bytes: int) -> None:
        self._address, self._name, self._timeout_s, self._bucket_bytes = address, name, timeout_s, bucket_bytes
        self._engines: list[EngineControl] = []
        self.group: GroupSpec | None = None
        self._member: BroadcastGroup | None = None
        self._in_version = False
        self._num_sent = 0
        self._loads: deque[tuple[int, SendThread]] = deque()

    def begin(self, version: int, engines: Sequence[EngineControl]) -> None:
        if self._in_version or list(map(id, engines)) != list(map(id, self._engines)):
            self._drop_group()
        self._engines, self._in_version, self._num_sent = list(engines), True, 0
        deadline = time.monotonic() + self._timeout_s
        fan_out({engine.name: engine.begin_update for engine in self._engines}, "begin_update", self._timeout_s)
        if self._member is None:
            self._make_group(deadline)
        else:
            self._open_receivers(deadline)

    def send(self, parts: Sequence[TensorPart], buffer: SharedBuffer) -> None:
        assert self.group is not None
        number, data = self._num_sent, buffer.tensor[: packed_bytes(parts)]
        deadline = time.monotonic() + self._timeout_s
        try:
            self._finish_loads(number - RECEIVER_BUFFERS, deadline)
            self._broadcast(data, deadline)
        except EngineError:
            self._leave()
            raise
        calls = {engine.name: partial(engine.load_received, self.group.name, number, parts) for engine in self._engines}
        self._loads.append((number, SendThread(partial(fan_out, calls, "load_received", self._timeout_s))))
        self._num_sent += 1

    def finish_calls(self) -> None:
        while self._loads:
            self._wait_for_load(time.monotonic() + self._timeout_s)

    def end(self, version: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        self._broadcast(None, deadline)
        self._finish_loads(self._num_sent, deadline)
        fan_out({engine.name: engine.end_update for engine in self._engines}, "end_update", self._timeout_s)
        self._in_version = False

    def close(self) -> None:
        if self.group is None:
            return
        calls = {engine.name: partial(engine.leave_group, self.group.name) for engine in self._engines}
        self._drop_group()
        try:
            fan_out(calls, "leave_group", LEAVE_TIMEOUT_S)
        except EngineError:
            # A dead engine has left the group; one that does not answer leaves it when it joins the next, or ends.
            return

    def _make_group(self, deadline: float) -> None:
        """Form a new group with the engines, which join in threads of their own."""
        world_size = 1 + sum(len(engine.place.nodes) for engine in self._engines)
        store: Any = serve_store(self._address, world_size, self._timeout_s)
        self.group = GroupSpec(
            name=f"{self._name}-{uuid4().hex[:12]}",
            address=self._address,
            port=store.port,
            world_size=world_size,
            backend=device.collective_backend(),
            bucket_bytes=self._bucket_bytes,
            timeout_s=self._timeout_s,
        )
        self._open_receivers(deadline)
        try:
            self._member = BroadcastGroup(self.group, 0, store)
        except GroupError as error:
            raise EngineError(str(error)) from error

    def _open_receivers(self, deadline: float) -> None:
        assert self.group is not None
        first_ranks = accumulate((len(engine.place.nodes) for engine in self._engines), initial=1)
        calls: dict[str, Callable[[], None]] = {
            engine.name: partial(engine.open_receivers, self.group, first_rank)
            for engine, first_rank in zip(self._engines, first_ranks, strict=False)
        }
        fan_out(calls, "open_receivers", max(0.0, deadline - time.monotonic()))

    def _broadcast(self, data: Tensor | None, deadline: float) -> None:
        """Announce and send a bucket's bytes; None announces the end of the version."""
        assert self._member is not None
        try:
            self._member.announce(0 if data is None else data.numel(), deadline)
            if data is not None:
                self._member.broadcast(data, deadline)
        except GroupError as error:
            # So that the receivers, which wait for a broadcast, notice at once.
            self._leave()
            # An engine that refused a bucket says why; the broadcast only notices.
            self._finish_loads(self._num_sent, time.monotonic() + self._timeout_s)
            raise EngineError(str(error)) from error

    def _finish_loads(self, last: int, deadline: float) -> None:
        """Wait for the loads of the buckets up to this number; raises EnginesFailed."""
        while self._loads and self._loads[0][0] <= last:
            error = self._wait_for_load(deadline)
            if error is not None:
                # Whatever their result: an engine gives no other sign of life while it loads.
                self.finish_calls()
                raise error

    def _wait_for_load(self, deadline: float) -> Exception | None:
        _, load = self._loads.popleft()
        return load.wait(max(deadline - time.monotonic(), 0.0) + LOADS_END_S)

    def _drop_group(self) -> None:
        self.finish_calls()
        self._leave()
        self.group, self._in_version = None, False

    def _leave(self) -> None:
        if self._member is not None:
            self._member.drop()
        self._member = None
