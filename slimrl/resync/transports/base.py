"""The protocol of transports."""

from collections.abc import Sequence
from typing import Protocol

from slimrl.data.model_weights import EngineControl, TensorPart
from slimrl.resync.ipc.shared_buffer import SharedBuffer


class Transport(Protocol):
    """A rank's side of a transport. Every rank has one for the whole run; only rank 0 uses it.

    A version is: begin, sends, end; or it fails anywhere.

    Each method raises EnginesFailed if it knows which engines failed and the others have finished the call, EngineError
    if it only knows that one failed, and OSError for a fault of this side (a full disk). It returns or raises within
    the deadline that the constructor was given.
    """

    written_bytes: int | None = None
    """Size of the files of the version that ended last, without the manifest; None for a transport that writes none."""
    changed_fraction: float | None = None
    """Fraction of all elements that changed since the version before; None for a version that is written whole"""

    def begin(self, version: int, engines: Sequence[EngineControl]) -> None:
        """Begin an attempt at a version for these engines, also after a failed one."""
        ...

    def send(self, parts: Sequence[TensorPart], buffer: SharedBuffer) -> None:
        """Send the bucket at the buffer's start to every engine; the buffer is free again on return.

        Called from a thread of its own, for one bucket at a time.
        """
        ...

    def end(self, version: int) -> None:
        """Returns when every engine has the whole version loaded."""
        ...

    def close(self) -> None:
        """Release the engines, which may be dead already. May be called more than once."""
        ...
