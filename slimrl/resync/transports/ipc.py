"""Transport to engines on the sender's node: they map the sender's buffers and load from them."""

from collections.abc import Sequence
from functools import partial

from slimrl.data.protocols import BucketSpec, EngineControl, GroupSpec
from slimrl.models.shared_buffer import SharedBuffer
from slimrl.resync.fan_out import fan_out
from slimrl.resync.live import LiveTensors


class IpcTransport:
    """Implements Transport.

    Args:
        timeout_s: deadline of the slowest engine for one call.
    """

    overlapping = True
    in_place_bytes: int | None = None
    group: GroupSpec | None = None
    written = None

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._engines: Sequence[EngineControl] = ()

    def connect(self, engines: Sequence[EngineControl], num_sources: int) -> None:
        self._engines = engines

    def begin(self, version: int) -> None:
        fan_out({engine.name: engine.begin_update for engine in self._engines}, "begin_update", self._timeout_s)

    def send(self, bucket: BucketSpec, buffer: SharedBuffer, live: LiveTensors) -> None:
        """Returns once every engine has answered, which it does when it has copied the bucket."""
        segment = buffer.segment()
        calls = {engine.name: partial(engine.load_shared_bucket, segment, bucket) for engine in self._engines}
        fan_out(calls, "load_shared_bucket", self._timeout_s)

    def arrived(self) -> None:
        """Engines have loaded a bucket by then."""

    def finish_calls(self) -> None:
        """None outlasts the method that makes it."""

    def end(self, version: int) -> None:
        fan_out({engine.name: engine.end_update for engine in self._engines}, "end_update", self._timeout_s)

    def close(self) -> None:
        self._engines = ()
