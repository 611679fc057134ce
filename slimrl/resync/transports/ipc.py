"""Transport to engines on the sender's node: they map the sender's buffers and load from them."""

from collections.abc import Sequence
from functools import partial

from slimrl.data.model_weights import EngineControl, TensorPart
from slimrl.resync.engine_calls import fan_out
from slimrl.resync.ipc.shared_buffer import SharedBuffer
from slimrl.resync.transports.base import Transport


class IpcTransport(Transport):
    """
    Args:
        timeout_s: deadline of the slowest engine for one call.
    """

    overlapping = True

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._engines: Sequence[EngineControl] = ()

    def begin(self, version: int, engines: Sequence[EngineControl]) -> None:
        self._engines = engines
        fan_out({engine.name: engine.begin_update for engine in self._engines}, "begin_update", self._timeout_s)

    def send(self, parts: Sequence[TensorPart], buffer: SharedBuffer) -> None:
        """Returns when every engine has copied the bucket."""
        segment = buffer.segment()
        calls = {engine.name: partial(engine.load_shared_bucket, segment, parts) for engine in self._engines}
        fan_out(calls, "load_shared_bucket", self._timeout_s)

    def end(self, version: int) -> None:
        fan_out({engine.name: engine.end_update for engine in self._engines}, "end_update", self._timeout_s)

    def close(self) -> None:
        self._engines = ()
