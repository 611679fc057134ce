"""The protocol of what brings a version from the trainer's ranks to its engines: the steps 1 to 3 of a resync."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from slimrl.data.model_weights import EngineControl
from slimrl.resync.engine_calls import EngineCalls
from slimrl.resync.expected_fingerprints import ExpectedFingerprints
from slimrl.resync.report import Clock

Progress = Callable[[int, int], None]
"""Function that is called with how many parts have arrived, and how many there are."""


SyncErrors = Callable[[str, Exception | None], None]
"""Called on all ranks with the place and this rank's error or None; raises on all where any has an error."""


class Transfer(Protocol):
    """One trainer rank's side. All ranks construct it, and call its methods, together."""

    def use(self, engines: Sequence[EngineControl]) -> None:
        """Send to these engines from the next version on.

        Raises:
            ValueError: they cannot be reached in this way.
        """
        ...

    def mine(self) -> list[EngineControl]:
        """The engines that this rank calls."""
        ...

    def run(
        self,
        version: int,
        calls: EngineCalls,
        clock: Clock,
        expected: ExpectedFingerprints,
        on_progress: Progress | None,
    ) -> None:
        """Pause the engines and load the version into each.

        Args:
            calls: this rank's; engines that cannot continue are taken out.

        Raises:
            RankError: another rank died or is late.
            ResyncError: the version cannot be sent; the engines stay paused.
        """
        ...

    @property
    def sent_bytes(self) -> int:
        """Tensor bytes of a version, counted once however many engines get them."""
        ...

    @property
    def parts(self) -> int:
        """Number of buckets, or of rounds of the engine that has most of them."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of memory that this rank holds for it."""
        ...

    @property
    def written_bytes(self) -> int | None:
        """Size of the version's files; None where none are written."""
        return None

    @property
    def changed_fraction(self) -> float | None:
        """Fraction of all elements that changed since the version before; None for a version that is sent whole."""
        return None

    @property
    def sent_by_rank(self) -> int:
        """Bytes that this rank has sent of the last version, to all engines; 0 where that is not counted."""
        return 0

    @property
    def received(self) -> Mapping[str, tuple[int, ...]]:
        """Bytes of the last version that came to each rank of each engine, on rank 0; empty where that is not
        counted."""
        return {}

    def close(self) -> None:
        """Release memory and engines. May be called more than once."""
        ...
