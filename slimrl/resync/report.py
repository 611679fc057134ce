"""The report of a resync, and the clock of its stages."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from slimrl.base.spans import SPANS


class ResyncError(Exception):
    """A resync failed; names version, bucket, tensor and cause."""


@dataclass(frozen=True, kw_only=True)
class ResyncReport:
    version: int
    bytes: int
    """Tensor bytes sent, counted once however many engines received them."""
    buckets: int
    seconds: float
    """Duration from pause to resume"""
    stage_seconds: dict[str, float]
    """Seconds of each stage on the slowest rank. pause: with opening the update. gather, transform: in the trainer.
    send: until engines have loaded, at the same time as the former two. wait: the part of it in which the trainer had
    nothing else to do. agree: on each bucket, with waiting for other ranks. activate: closing the update, flush,
    version, resume. verify: fingerprints of the engines' and the trainer's tensors. hash: fingerprints before and after
    the transform, bucket by bucket."""
    verified_tensors: int
    """Number of tensors compared, counted once per engine."""
    mismatching: tuple[str, ...]
    """Names of the tensors that differed, `<engine>: <tensor>`. If there are any, all engines are still paused."""
    failed_engines: dict[str, str]
    """Engines that were taken out, and why; they are paused or dead."""
    stale_requests: int
    """Number of requests that continue with keys and values of earlier weights."""
    peak_extra_bytes: int
    """Bytes of memory for resyncs on the rank that holds most."""
    sent_per_rank: tuple[int, ...] = ()
    """Bytes that each trainer rank has sent, to all engines together (`p2p`)"""
    received_per_rank: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Bytes that came to each rank of each engine, by the engine's name, from the trainer and other ranks (`p2p`)"""
    written_bytes: int | None = None
    """Size of the version's files (`disk`, `delta`); None for other transports"""
    changed_fraction: float | None = None
    """Fraction of all elements that changed since the version before (`delta`); None for a version that is written
    whole"""

    @property
    def transfer_seconds(self) -> float:
        """Duration from pause to resume, without the verification that follows the transfer."""
        return self.seconds - self.stage_seconds["verify"]


class Clock:
    """Adds up seconds by stage. Two threads must not time one stage at once."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            with SPANS(stage):
                yield
        finally:
            self.seconds[stage] += time.perf_counter() - start


class SendClock:
    """Adds the seconds in which at least one send was running to the stage `send`. For sends that end in order."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._until = 0.0

    def run(self, send: Callable[[], object]) -> None:
        start = time.perf_counter()
        try:
            send()
        finally:
            with self._lock:
                end = time.perf_counter()
                self._clock.seconds["send"] += end - max(start, self._until)
                self._until = end
