"""Resyncs of a run: the trainer's weights into every engine, under one new version number.

1. pause: `resync.pause` decides what happens to running requests.
2. Send the version: from each rank to each rank (ipc/transfer.py, p2p/transfer.py), or in buckets
   (bucket_transfer.py).
3. end: every engine has the whole version.
4. flush the prefix caches, which hold keys and values of the old weights, unless the recipe keeps them, and set the
   version.
5. Compare fingerprints of loaded tensors with the trainer's.
6. resume, unless a fingerprint differs: then all engines stay paused.

After a fault in the steps 1 to 3, engines that give no sign of life or failed twice are taken out, and the version
starts again for the others. Later an engine that fails is taken out at once. `use` brings an engine back. After a fault
on the trainer's side, or with no engine left, all engines stay paused.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from slimrl.config.schema.resync import PauseMode, ResyncConfig, TransportName
from slimrl.data.model_weights import EngineControl, WeightSource
from slimrl.resync.bucket_transfer import BucketTransfer
from slimrl.resync.buckets import Transform
from slimrl.resync.engine_calls import PROBE_TIMEOUT_S, EngineCalls
from slimrl.resync.expected_fingerprints import ExpectedFingerprints
from slimrl.resync.ipc.transfer import IpcTransfer
from slimrl.resync.p2p.transfer import PeerTransfer
from slimrl.resync.ranks import RankError, Ranks
from slimrl.resync.report import Clock, ResyncError, ResyncReport
from slimrl.resync.transfer import Progress, Transfer
from slimrl.resync.transform import Quantize
from slimrl.resync.transports.base import Transport


class ResyncSession:
    """One trainer rank in the resyncs of a run. All ranks construct it, and call each method, together.

    Args:
        source: this rank's weights.
        engines: all that receive them; the same on every rank.
        rank: of this process in the trainer.
        run_id: part of the names of shared memory and groups.
        node: name of this rank's node, as in the engines' EnginePlace.
        address: of rank 0 as the engines reach it, for the `p2p` transport.
        transport: None for the one that the config names.
        model_dir: checkpoint whose configuration and tokenizer go into versions on a disk (`disk`, `delta`).
        run_dir: of the run; versions go there where the config names no folder for them.
        transform: of tensors between trainer and engines.

    Raises:
        ValueError: `resync.bucket_bytes` is too small, or an engine cannot be reached by the transport.
    """

    def __init__(
        self,
        source: WeightSource,
        engines: Sequence[EngineControl],
        config: ResyncConfig,
        *,
        rank: int,
        run_id: str,
        node: str = "",
        address: str = "127.0.0.1",
        transport: Transport | None = None,
        model_dir: Path = Path(),
        run_dir: Path = Path(),
        transform: Transform | None = None,
    ) -> None:
        self._source, self._config, self._transform = source, config, transform
        # A rank that waits for a sender waits for its slowest engine, and for the probes after a failure.
        deadline_s = 2 * (config.timeout_s + PROBE_TIMEOUT_S)
        self._ranks = Ranks(node, deadline_s)
        assert self._ranks.rank == rank, "not the rank of the process group"
        self._layout = source.layout()
        self._transfer: Transfer
        if transport is None and config.transport is TransportName.ipc:
            assert transform is None or isinstance(transform, Quantize), "of block FP8"
            self._transfer = IpcTransfer(
                source,
                self._ranks,
                engines,
                run_id=run_id,
                timeout_s=config.timeout_s,
                deadline_s=deadline_s,
                bucket_bytes=config.bucket_bytes,
                pause=config.pause,
                transform=transform,
            )
        elif transport is None and config.transport is TransportName.p2p:
            assert transform is None or isinstance(transform, Quantize), "of block FP8"
            self._transfer = PeerTransfer(
                source,
                self._ranks,
                engines,
                address=address,
                run_id=run_id,
                timeout_s=config.timeout_s,
                bucket_bytes=config.bucket_bytes,
                pause=config.pause,
                transform=transform,
            )
        else:
            self._transfer = BucketTransfer(
                source,
                self._ranks,
                engines,
                config,
                run_id=run_id,
                deadline_s=deadline_s,
                transport=transport,
                model_dir=model_dir,
                run_dir=run_dir,
                transform=transform,
            )
        self._num_engines = len(engines)
        self._completed = -1

    def use(self, engines: Sequence[EngineControl]) -> None:
        """Send to these engines from the next version on, also to those that were taken out.

        Raises:
            ValueError: an engine cannot be reached by the transport.
        """
        self._transfer.use(engines)
        self._num_engines = len(engines)

    def run(self, version: int, on_progress: Progress | None = None) -> ResyncReport | None:
        """Bring every engine to the source's weights; rank 0 gets the report.

        If the report names tensors that differ, no engine was resumed, and the version may be sent again.

        Raises:
            ValueError: the version is not above the last one that was completed.
            ResyncError: the engines stay paused; `run` may be called again.
        """
        if version <= self._completed:
            raise ValueError(f"resync of version {version}: version {self._completed} has been sent already")
        start, clock = time.monotonic(), Clock()
        calls = EngineCalls(self._transfer.mine(), self._config.timeout_s)
        try:
            expected = ExpectedFingerprints(self._layout, self._transform, self._config, version)
            self._transfer.run(version, calls, clock, expected, on_progress)
            report = self._activate(version, calls, clock, expected, start)
        except (RankError, OSError) as error:
            raise ResyncError(f"resync of version {version} failed: {error}") from error
        if not report.mismatching:
            self._completed = version
        return report if self._ranks.rank == 0 else None

    def close(self) -> None:
        """Release shared memory and the engines; may be called more than once."""
        self._transfer.close()
        self._ranks.close()

    def _activate(
        self, version: int, calls: EngineCalls, clock: Clock, expected: ExpectedFingerprints, start: float
    ) -> ResyncReport:
        """Steps 4 to 6; the report is complete on rank 0 only."""
        with clock("activate"):
            stale = sum(calls.each_or_out("flush_cache", self._flush).values())
            calls.each_or_out("set_version", lambda engine: engine.set_version(version))
            # A barrier, so that `verify` has no waiting for the slowest sender in it.
            self._ranks.agree(0)
        with clock("verify"):
            num_verified, mismatching = self._verify(expected, calls)
            # No engine serves the version before all have it and it is verified.
            any_wrong = self._ranks.agree(int(bool(mismatching)))
        if not any_wrong:
            with clock("activate"):
                calls.each_or_out("resume", lambda engine: engine.resume())
        memory = self._transfer.nbytes
        parts = self._ranks.gather_objects(
            (
                len(calls.engines),
                calls.failed,
                mismatching,
                stale,
                dict(clock.seconds),
                memory,
                self._transfer.sent_by_rank,
            )
        )
        engines, failures, mismatches, stales, seconds, memories, sent = zip(*parts, strict=True)
        failed = {name: reason for each in failures for name, reason in each.items()}
        if self._num_engines and not sum(engines):
            reasons = "; ".join(failed.values())
            raise ResyncError(f"resync of version {version} failed after the last bucket: no engine is left: {reasons}")
        return ResyncReport(
            version=version,
            bytes=self._transfer.sent_bytes,
            buckets=self._transfer.parts,
            seconds=time.monotonic() - start,
            stage_seconds={
                stage: max(each.get(stage, 0.0) for each in seconds)
                for stage in dict.fromkeys(stage for each in seconds for stage in each)
            },
            verified_tensors=num_verified * sum(engines),
            mismatching=tuple(name for each in mismatches for name in each),
            failed_engines=failed,
            stale_requests=sum(stales),
            peak_extra_bytes=max(memories),
            sent_per_rank=sent,
            received_per_rank=dict(self._transfer.received),
            written_bytes=self._transfer.written_bytes,
            changed_fraction=self._transfer.changed_fraction,
        )

    def _flush(self, engine: EngineControl) -> int:
        """Requests that continue with keys and values of the old weights; if there are any, nothing is flushed."""
        running = engine.running_requests() if self._config.pause is PauseMode.in_place else 0
        if not running and self._config.flush_cache:
            engine.flush_cache()
        return running

    def _verify(self, expected: ExpectedFingerprints, calls: EngineCalls) -> tuple[int, tuple[str, ...]]:
        """(tensors compared per engine, `<engine>: <tensor>` of those that differ)."""
        names = expected.names
        if not names:
            return 0, ()
        pool = ThreadPoolExecutor(1)
        try:
            # The engines hash their weights while the ranks hash theirs.
            asked = pool.submit(calls.each_or_out, "fingerprints", partial(_loaded_prints, expected))
            hashes, lost = expected.fingerprints(self._source, self._ranks)
            loaded = asked.result()
        finally:
            # A rank that died is reported at once, also while an engine hangs until its deadline.
            pool.shutdown(wait=False)
        mismatching = [f"gathering: {name}" for name in lost] if self._ranks.rank == 0 else []
        mismatching += [
            f"{engine}: {name}"
            for engine, prints in loaded.items()
            for name, value in hashes.items()
            if prints.get(name) != value
        ]
        return len(names), tuple(mismatching)


def _loaded_prints(expected: ExpectedFingerprints, engine: EngineControl) -> dict[str, str]:
    """Fingerprints of the loaded tensors of an engine's model and of its draft model."""
    drafts = expected.draft_names
    names = [name for name in expected.names if name not in set(drafts)]
    prints = engine.fingerprints(names) if names else {}
    return prints | engine.draft_fingerprints(drafts) if drafts else prints
