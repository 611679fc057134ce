"""What a transport offers to a resync session."""

from typing import Protocol

from torch import Tensor

from slimrl.data.protocols import BucketSpec


class Transport(Protocol):
    """Lives on trainer rank 0, for the whole run."""

    def open(self, nbytes: int) -> Tensor:
        """Connect to the engines; called once, before the first bucket.

        Returns:
            uint8 [nbytes]: the buffer into which the session packs one bucket after the other.

        Raises:
            EngineError: an engine did not take part.
        """
        ...

    def send(self, bucket: BucketSpec) -> None:
        """Have every engine load the bucket that lies at the buffer's start; the buffer is free again on return.

        Raises:
            EngineError: an engine refused, died, or outran the deadline.
        """
        ...

    def close(self) -> None:
        """Let go of the buffer and of the engines, which may be gone already. May be called more than once."""
        ...
