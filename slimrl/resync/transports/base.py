"""What a transport offers to a resync session."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from slimrl.data.protocols import BucketSpec, EngineControl, GroupSpec
from slimrl.models.shared_buffer import SharedBuffer
from slimrl.resync.live import LiveTensors


@dataclass(frozen=True, kw_only=True)
class Written:
    """What a version took on the disk."""

    nbytes: int
    """Of its files, without the manifest"""
    changed_fraction: float | None
    """Of all elements, against the version before; None for one that is written whole"""


class Transport(Protocol):
    """On every rank for the whole run; senders alone use it, but for `in_place_bytes`, `group` and `finish_calls`.

    A version is: connect, begin, for each bucket send and arrived, end; or it breaks off anywhere.

    Each method raises EnginesFailed where it knows which engines failed and the others have finished with the call,
    EngineError where it only knows that one did, OSError for a fault of this side (a full disk), and returns or raises
    within the deadline that its maker was given.
    """

    overlapping: bool
    """Whether `send` may be called for a bucket before the call for the one before it has returned."""
    in_place_bytes: int | None
    """Whole tensors of as many bytes are sent from where they lie in the trainer; None where it takes none."""
    group: GroupSpec | None
    """After `begin`: what other ranks join to send such tensors; None where they cannot."""

    @property
    def written(self) -> Written | None:
        """Of the version that ended last; None where nothing is written."""
        ...

    def connect(self, engines: Sequence[EngineControl], num_sources: int) -> None:
        """Take these engines from now on; joins, or makes anew, what they need where they changed.

        Called before every attempt at a version, after one that broke off too.

        Args:
            num_sources: trainer ranks that send to them, this one included; 1 where nothing is sent in place.
        """
        ...

    def begin(self, version: int) -> None: ...

    def send(self, bucket: BucketSpec, buffer: SharedBuffer, live: LiveTensors) -> None:
        """Have every engine take the bucket that lies at the buffer's start; the buffer is free again on return.

        Args:
            live: tensors that are not in the buffer, of `in_place_bytes` or more.

        Called from a thread of its own, for one bucket at a time, or two where the transport is overlapping.
        """
        ...

    def arrived(self) -> None:
        """All sources have sent what they have of the next bucket, in the order of `send`; does not wait."""
        ...

    def finish_calls(self) -> None:
        """Returns when no call to an engine is under way any more, however they ended; no `send` is."""
        ...

    def end(self, version: int) -> None:
        """Returns when every engine has the whole version loaded."""
        ...

    def close(self) -> None:
        """Let go of the engines, which may be gone already. May be called more than once."""
        ...
