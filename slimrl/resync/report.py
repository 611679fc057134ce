"""What a resync reports, and the clock of its stages."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class ResyncError(Exception):
    """A resync broke off; says at which version, bucket and tensor, and what failed."""


@dataclass(frozen=True, kw_only=True)
class ResyncReport:
    version: int
    bytes: int
    """Tensor bytes sent, counted once however many engines received them."""
    buckets: int
    seconds: float
    """From pause to resume"""
    stage_seconds: dict[str, float]
    """Of the slowest rank. pause: with opening the update. gather, transform: in the trainer. send: until engines have
    loaded, beside the former ones; wait: the rest of it, when nothing else was to be done. agree: on each bucket, with
    waiting for other ranks. activate: closing the update, flush, version, resume. verify: fingerprints of what engines
    loaded and should have. hash: fingerprints of what the transform takes and makes, bucket by bucket."""
    verified_tensors: int
    """Tensors compared, counted once per engine."""
    mismatching: tuple[str, ...]
    """`<engine>: <tensor>` of each that differed; if there are any, all engines are still paused."""
    failed_engines: dict[str, str]
    """Engines that were taken out, and why; they are paused, or gone."""
    stale_requests: int
    """Requests that go on with keys and values of earlier weights."""
    peak_extra_bytes: int
    """Memory that the largest rank holds for resyncs besides its weights."""
    written_bytes: int | None = None
    """Of the version's files (`disk`, `delta`)"""
    changed_fraction: float | None = None
    """Of all elements, against the version before (`delta`); None too for a version that is written whole"""

    @property
    def transfer_seconds(self) -> float:
        """From pause to resume, without the verification that follows the transfer."""
        return self.seconds - self.stage_seconds["verify"]


class Clock:
    """Adds up seconds by stage; not for two threads at once under one name."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - start
