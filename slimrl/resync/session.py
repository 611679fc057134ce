"""One resync: the trainer's weights into every engine, under one new version number.

1. pause: engines put running requests back into their queues.
2. begin, then bucket by bucket: gather, pack, send; end.
3. flush the prefix caches, which hold keys and values of the old weights, and set the version.
4. Compare fingerprints of loaded tensors with the trainer's.
5. resume.

A step that fails leaves the engines paused: their weights may be of two versions, and no request may see them.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from slimrl.config.schema import ResyncConfig, TransportName, VerifyMode
from slimrl.data.protocols import BucketSpec, EngineControl, EngineError, WeightSource
from slimrl.models.fingerprint import fingerprint
from slimrl.resync.fan_out import fan_out
from slimrl.resync.packing import BucketPacker
from slimrl.resync.plan import plan_buckets
from slimrl.resync.shared_buffer import SharedBuffer, clean_stale_segments, shared_buffer
from slimrl.resync.transports.base import Transport
from slimrl.resync.transports.collective import CollectiveTransport
from slimrl.resync.transports.ipc import IpcTransport

Progress = Callable[[int, int], None]
"""Called with (buckets sent, buckets in all)."""


class ResyncError(Exception):
    """A resync broke off; says at which version and bucket, and which engine failed."""


@dataclass(frozen=True, kw_only=True)
class ResyncReport:
    version: int
    bytes: int
    """Tensor bytes sent, counted once however many engines received them."""
    buckets: int
    seconds: float
    """From pause to resume."""
    verified_tensors: int
    """Tensors compared, counted once per engine."""
    fingerprint_mismatches: int
    mismatching: tuple[str, ...]
    """`<engine>: <tensor>` of each mismatch."""
    failed_engines: Mapping[str, str] = field(default_factory=dict)
    """Why each engine that was left out failed, by its name."""
    stale_requests: int = 0
    """Requests that go on with keys and values of older weights."""


class ResyncSession:
    """One trainer rank's part in the resyncs of a run. Rank 0 talks to the engines, the others give their shards.

    Args:
        source: this rank's end of the gathering.
        engines: all that are to receive the weights; used on rank 0 alone.
        rank: of this process in the trainer.
        run_id: names shared-memory segments and broadcast groups of this run.
        address: of rank 0 as the engines reach it, for the `collective` transport.
        transport: None for the one that the config names; opened at the first run.
    """

    def __init__(
        self,
        source: WeightSource,
        engines: Sequence[EngineControl],
        config: ResyncConfig,
        *,
        rank: int,
        run_id: str,
        address: str = "127.0.0.1",
        transport: Transport | None = None,
    ) -> None:
        self._source = source
        self._engines = engines
        self._config = config
        self._rank = rank
        self._transport = transport or make_transport(config, run_id, address)
        self._run_id = run_id
        self._names = [spec.name for spec in source.specs()]
        self._buckets = plan_buckets(source.specs(), config.bucket_bytes)
        self._buffer: SharedBuffer | None = None

    def run(self, version: int, on_progress: Progress | None = None) -> ResyncReport | None:
        """Bring every engine to the source's weights; all ranks call it, and rank 0 gets the report.

        Raises:
            ResyncError: an engine refused, died, or outran a deadline; the engines stay paused, and the other ranks
                may wait for rank 0 until their own deadline.
        """
        if self._rank == 0:
            return self._run(version, on_progress)
        for _ in self._source.tensors():
            pass
        return None

    def use(self, engines: Sequence[EngineControl]) -> None:
        """Send to these engines from the next version on; every rank calls it."""
        self._engines = engines

    def close(self) -> None:
        """Release shared memory and the engines; any rank may call it, more than once too."""
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None
        self._transport.close()

    def _run(self, version: int, on_progress: Progress | None) -> ResyncReport:
        start = time.monotonic()
        place = "before the first bucket"
        to_verify = verified_names(self._names, self._config, version)
        try:
            if self._buffer is None:
                clean_stale_segments()
                self._buffer = shared_buffer(max(bucket.nbytes for bucket in self._buckets), self._run_id)
            self._transport.connect(self._engines)
            self._each("pause", lambda engine: engine.pause(self._config.pause))
            self._transport.begin(version)
            expected: dict[str, str] = {}
            stream = self._source.tensors()
            for number, bucket in enumerate(self._buckets, 1):
                place = f"at bucket {number} of {len(self._buckets)}"
                expected.update(self._fill(bucket, stream, to_verify))
                self._transport.send(bucket, self._buffer)
                if on_progress is not None:
                    on_progress(number, len(self._buckets))
            assert next(stream, None) is None, "the source has more tensors than it declares"
            place = "after the last bucket"
            self._transport.end(version)
            self._each("flush_cache", lambda engine: engine.flush_cache())
            self._each("set_version", lambda engine: engine.set_version(version))
            mismatching = self._verify(expected)
            self._each("resume", lambda engine: engine.resume())
        except EngineError as error:
            raise ResyncError(f"resync of version {version} failed {place}: {error}") from error
        return ResyncReport(
            version=version,
            bytes=sum(bucket.nbytes for bucket in self._buckets),
            buckets=len(self._buckets),
            seconds=time.monotonic() - start,
            verified_tensors=len(expected) * len(self._engines),
            fingerprint_mismatches=len(mismatching),
            mismatching=mismatching,
        )

    def _each(self, what: str, call: Callable[[EngineControl], Any]) -> dict[str, Any]:
        calls = {engine.name: partial(call, engine) for engine in self._engines}
        return fan_out(calls, what, self._config.timeout_s)

    def _fill(self, bucket: BucketSpec, stream: Iterator[tuple[str, Any]], to_verify: frozenset[str]) -> dict[str, str]:
        """Pack the bucket; the fingerprints of those of its tensors that are to be verified."""
        assert self._buffer is not None
        packer = BucketPacker(bucket, self._buffer.tensor)
        prints = {}
        while not packer.is_full:
            name, tensor = next(stream)
            packer.put(name, tensor)
            if name in to_verify:
                prints[name] = fingerprint(tensor)
        return prints

    def _verify(self, expected: dict[str, str]) -> tuple[str, ...]:
        if not expected:
            return ()
        names = None if self._config.verify == VerifyMode.full else list(expected)
        loaded = self._each("fingerprints", lambda engine: engine.fingerprints(names))
        return tuple(
            f"{engine}: {name}"
            for engine, prints in loaded.items()
            for name, value in expected.items()
            if prints.get(name) != value
        )


def make_transport(config: ResyncConfig, run_id: str, address: str) -> Transport:
    """The transport that the config names, not yet connected."""
    if config.transport == TransportName.ipc:
        return IpcTransport(config.timeout_s)
    return CollectiveTransport(address, f"slimrl-{run_id}", config.timeout_s)


def verified_names(names: Sequence[str], config: ResyncConfig, version: int) -> frozenset[str]:
    """Tensors to compare at a version: with `sampled` the next `sampled_tensors` of a ring.

    Each tensor is compared at least once in any ceil(len(names) / sampled_tensors) consecutive versions.
    """
    if config.verify == VerifyMode.off:
        return frozenset()
    size = min(config.sampled_tensors, len(names))
    if config.verify == VerifyMode.full or size == len(names):
        return frozenset(names)
    start = version * size
    return frozenset(names[(start + i) % len(names)] for i in range(size))
