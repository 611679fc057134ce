"""Transport to engines on the trainer's node: one buffer that all of them map, written once per bucket."""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from slimrl.data.protocols import BucketSpec, EngineControl
from slimrl.resync.fan_out import fan_out
from slimrl.resync.transports.shared_buffer import SharedBuffer, clean_stale_segments, shared_buffer


class IpcTransport:
    """Implements Transport.

    Args:
        run_id: part of the segment's name, for people who look into /dev/shm.
        timeout_s: deadline of the slowest engine for one bucket.
    """

    def __init__(self, engines: Sequence[EngineControl], run_id: str, timeout_s: float) -> None:
        self._engines = engines
        self._run_id = run_id
        self._timeout_s = timeout_s
        self._buffer: SharedBuffer | None = None

    def open(self, nbytes: int) -> Tensor:
        """Raises OSError: no shared memory is left, that of killed runs included, which is freed first."""
        assert self._buffer is None, "opened twice"
        clean_stale_segments()
        self._buffer = shared_buffer(nbytes, self._run_id)
        return self._buffer.tensor

    def send(self, bucket: BucketSpec) -> None:
        """Returns once every engine has answered, which it does when it has copied the bucket."""
        assert self._buffer is not None, "not open"
        calls = {
            engine.name: partial(engine.load_shared_bucket, self._buffer.segment(), bucket) for engine in self._engines
        }
        fan_out(calls, "load_shared_bucket", self._timeout_s)

    def close(self) -> None:
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None
