"""Transport by broadcast (NCCL or gloo) from trainer rank 0, the sender, to the engines, on any node.

A group with one receiver per engine and node is made once, and made anew, under another name, when the engines change
or a version broke off. Every byte goes to each receiver once; its neighbours on the node read the receiver's memory
(slimrl/rollout/bucket_receiver.py).

A bucket is broadcast in pieces (slimrl/models/broadcast_pieces.py). On a CPU large tensors are pieces of their own, so
that they can go from the live weight to where they belong without a copy at either end; other ranks of the sender's
node send those that they hold themselves (slimrl/resync/contribution.py).
A send returns when the sender's pieces are out. When those of all sources are, the engines load the bucket while the
next one is broadcast; before the one after the next they must have loaded it, since it takes the same memory in the
receiver.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any
from uuid import uuid4

import torch

from slimrl import device
from slimrl.data.protocols import BucketSpec, EngineControl, EngineError, GroupSpec
from slimrl.models.broadcast_group import BroadcastGroup, GroupError, serve_store
from slimrl.models.broadcast_pieces import cut_pieces, encode_pieces
from slimrl.models.shared_buffer import SharedBuffer
from slimrl.resync.fan_out import fan_out
from slimrl.resync.live import LiveTensors
from slimrl.resync.sending import Sending

IN_PLACE_BYTES = 500_000
"""Where broadcasts are from place to place: of the smallest tensor that is worth one of its own."""

LEAVE_TIMEOUT_S = 5.0
"""How long `close` waits for the engines to leave the group."""

LOADS_END_S = 1.0
"""Beyond a load's own deadline, for its thread to end."""

RECEIVER_BUFFERS = 2
"""Buckets that a receiver has room for."""


class CollectiveTransport:
    """Implements Transport.

    Args:
        address: of the trainer's rank 0 as the engines reach it.
        name: of the run, for people who read logs.
        timeout_s: deadline of each call, however many broadcasts it takes.
        bucket_bytes: of the largest bucket that will be sent.
    """

    overlapping = False
    written = None

    def __init__(self, address: str, name: str, timeout_s: float, *, bucket_bytes: int) -> None:
        self._address, self._name, self._timeout_s, self._bucket_bytes = address, name, timeout_s, bucket_bytes
        self._engines: list[EngineControl] = []
        self._num_sources = 1
        self.group: GroupSpec | None = None
        self._member: BroadcastGroup | None = None
        self._in_version = False
        self._num_sent = 0
        self._sent: deque[tuple[int, BucketSpec]] = deque()
        self._loads: deque[tuple[int, Sending]] = deque()
        self.in_place_bytes = IN_PLACE_BYTES if device.broadcasts_in_place() else None

    def connect(self, engines: Sequence[EngineControl], num_sources: int) -> None:
        same = list(map(id, engines)) == list(map(id, self._engines)) and num_sources == self._num_sources
        if self._in_version or not same:
            self._drop_group()
        self._engines, self._num_sources = list(engines), num_sources
        # From here on other sources leave the group if the version breaks off, wherever it does.
        self._in_version = True

    def begin(self, version: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        self._num_sent = 0
        self._sent.clear()
        fan_out({engine.name: engine.begin_update for engine in self._engines}, "begin_update", self._timeout_s)
        if self._member is None:
            self._make_group(deadline)
        else:
            self._open_receivers(deadline)

    def send(self, bucket: BucketSpec, buffer: SharedBuffer, live: LiveTensors) -> None:
        try:
            self._send(bucket, buffer, live)
        except EngineError:
            self._leave()
            raise

    def _send(self, bucket: BucketSpec, buffer: SharedBuffer, live: LiveTensors) -> None:
        deadline = time.monotonic() + self._timeout_s
        self._finish_loads(self._num_sent - RECEIVER_BUFFERS, deadline)
        on = buffer.tensor.device
        pieces = cut_pieces(bucket, self.in_place_bytes, live.sources)
        table = torch.frombuffer(encode_pieces(pieces), dtype=torch.uint8).to(on)
        packed = buffer.tensor[: bucket.nbytes].split([piece.nbytes for piece in pieces])
        self._broadcast(deadline, torch.tensor([bucket.nbytes, table.numel()], device=on))
        self._broadcast(deadline, table)
        own = (each for each in zip(pieces, packed, strict=True) if each[0].source == 0)
        self._broadcast(deadline, *(live.own.get(piece.offset, place) for piece, place in own))
        self._sent.append((self._num_sent, bucket))
        self._num_sent += 1
        if self._num_sources == 1:
            # Nobody else's part is to be waited for.
            self._begin_load()

    def arrived(self) -> None:
        if self._num_sources > 1:
            self._begin_load()

    def finish_calls(self) -> None:
        while self._loads:
            self._wait_for_load(time.monotonic() + self._timeout_s)

    def _begin_load(self) -> None:
        assert self.group is not None
        number, bucket = self._sent.popleft()
        calls = {
            engine.name: partial(engine.load_received, self.group.name, number, bucket) for engine in self._engines
        }
        self._loads.append((number, Sending(partial(fan_out, calls, "load_received", self._timeout_s))))

    def end(self, version: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        self._broadcast(deadline, torch.zeros(2, dtype=torch.int64, device=device.compute_device()))
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
            # One that is gone has left the group; one that does not answer leaves it with the next group, or its end.
            return

    def _make_group(self, deadline: float) -> None:
        """Join with the engines, which do so in threads of their own."""
        *_, world_size = accumulate((len(engine.place.nodes) for engine in self._engines), initial=1)
        store: Any = serve_store(self._address, world_size, self._timeout_s)
        self.group = GroupSpec(
            name=f"{self._name}-{uuid4().hex[:12]}",
            address=self._address,
            port=store.port,
            world_size=world_size,
            backend=device.collective_backend(),
            bucket_bytes=self._bucket_bytes,
            timeout_s=self._timeout_s,
            num_sources=self._num_sources,
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

    def _broadcast(self, deadline: float, *tensors: torch.Tensor) -> None:
        assert self._member is not None
        try:
            self._member.broadcast(*tensors, deadline=deadline)
        except GroupError as error:
            # Other sources and receivers, which wait for what will not come, notice at once.
            self._leave()
            # An engine that refused a bucket says why; the broadcast only notices.
            self._finish_loads(self._num_sent, time.monotonic() + self._timeout_s)
            raise EngineError(str(error)) from error

    def _finish_loads(self, last: int, deadline: float) -> None:
        """Wait for the loads that have begun of the buckets up to this number; raises EnginesFailed."""
        while self._loads and self._loads[0][0] <= last:
            error = self._wait_for_load(deadline)
            if error is not None:
                # However the others end; an engine that loads gives no other sign of life.
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
