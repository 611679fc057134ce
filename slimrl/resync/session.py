"""Resyncs of a run: the trainer's weights into every engine, under one new version number.

1. pause: what becomes of running requests is `resync.pause`'s choice.
2. begin; then bucket by bucket gather, transform, send, where a bucket is sent and loaded while the next is gathered.
3. end. From here on an engine has the whole version.
4. flush the prefix caches, which hold keys and values of the old weights, and set the version.
5. Compare fingerprints of loaded tensors with the trainer's.
6. resume, unless a fingerprint differs: then all engines stay paused.

An engine has the version, or is taken out, or stays paused. After a fault in the steps 1 to 3, engines that give no
sign of life or failed twice are out, and the version starts again for the rest. Later, who fails is out. `use` brings
an engine back. After a fault of the trainer's side, or with no engine left, all stay paused.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from slimrl.config.schema import PauseMode, ResyncConfig, TransportName
from slimrl.data.protocols import EngineControl, EngineError, WeightSource
from slimrl.resync.buckets import Transform
from slimrl.resync.contribution import Contribution
from slimrl.resync.expectation import Expectation
from slimrl.resync.fleet import PROBE_TIMEOUT_S, Fleet
from slimrl.resync.pipeline import Pipeline, Progress, Settle
from slimrl.resync.plan import ResyncPlan, plan_resync
from slimrl.resync.ranks import RankError, Ranks
from slimrl.resync.report import Clock, ResyncError, ResyncReport
from slimrl.resync.transports.base import Transport
from slimrl.resync.transports.collective import CollectiveTransport
from slimrl.resync.transports.delta import DeltaTransport
from slimrl.resync.transports.disk import DiskTransport
from slimrl.resync.transports.ipc import IpcTransport
from slimrl.resync.verdict import SourceFailed, StartAgain, settle


class ResyncSession:
    """One trainer rank's part in the resyncs of a run. All ranks make it, and call each method, together.

    Args:
        source: this rank's end of the weights.
        engines: all that are to receive them; the same on every rank.
        rank: of this process in the trainer.
        run_id: names shared-memory segments and broadcast groups of this run.
        node: on which this rank runs, under a name that the engines' places use too.
        address: of rank 0 as the engines reach it, for the `collective` transport.
        transport: None for the one that the config names.
        model_dir: checkpoint whose configuration and tokenizer go into versions on a disk (`disk`, `delta`).
        run_dir: of the run; versions go there where the config names no folder for them.
        transform: of tensors between trainer and engines.

    Raises:
        ValueError: see `plan_resync`.
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
        self._source, self._config, self._run_id, self._transform = source, config, run_id, transform
        # Whoever waits for a sender waits for its slowest engine, and for the probes after a failure.
        deadline_s = 2 * (config.timeout_s + PROBE_TIMEOUT_S)
        self._ranks = Ranks(node, deadline_s)
        assert self._ranks.rank == rank, "not the rank of the process group"
        self._tensors = source.layout()
        self._plan = self._make_plan(engines)
        self._transport = transport or make_transport(
            config, self._plan, run_id=run_id, address=address, model_dir=model_dir, run_dir=run_dir
        )
        self._engines = list(engines)
        self._pipeline: Pipeline | None = None
        self._contribution = Contribution()
        self._completed = -1
        self._deadline_s = deadline_s

    def use(self, engines: Sequence[EngineControl]) -> None:
        """Send to these engines from the next version on, to those too that were taken out.

        Raises:
            ValueError: see `plan_resync`.
        """
        plan = self._make_plan(engines)
        self._engines = list(engines)
        if plan.senders != self._plan.senders:
            self._close_pipeline()
            self._plan = plan

    def run(self, version: int, on_progress: Progress | None = None) -> ResyncReport | None:
        """Bring every engine to the source's weights; rank 0 gets the report.

        Where the report names tensors that differ, no engine was resumed, and the version may be sent again.

        Raises:
            ValueError: the version is not above the last one that was completed.
            ResyncError: the engines stay paused; the next run takes them as they are.
        """
        if version <= self._completed:
            raise ValueError(f"resync of version {version}: version {self._completed} was sent before")
        start, clock = time.monotonic(), Clock()
        fleet = self._my_fleet()
        try:
            expectation = Expectation(self._tensors, self._transform, self._config, version)
            self._transfer(version, fleet, clock, expectation, on_progress)
            report = self._activate(version, fleet, clock, expectation, start)
        except (RankError, OSError) as error:
            raise ResyncError(f"resync of version {version} failed: {error}") from error
        if not report.mismatching:
            self._completed = version
        return report if self._ranks.rank == 0 else None

    def close(self) -> None:
        """Release shared memory and the engines; more than once too."""
        self._close_pipeline()
        self._contribution.leave()
        self._transport.close()
        self._ranks.close()

    def _make_plan(self, engines: Sequence[EngineControl]) -> ResyncPlan:
        return plan_resync(
            self._tensors,
            self._ranks.nodes,
            [engine.place for engine in engines],
            transport=self._config.transport,
            bucket_bytes=self._config.bucket_bytes,
            transform=self._transform,
        )

    def _my_fleet(self) -> Fleet:
        sender = self._plan.sender(self._ranks.rank)
        names = sender.engines if sender else ()
        return Fleet([engine for engine in self._engines if engine.name in names], self._config.timeout_s)

    def _transfer(
        self, version: int, fleet: Fleet, clock: Clock, expectation: Expectation, on_progress: Progress | None
    ) -> None:
        """Steps 1 to 3, again and again without engines that fail."""
        if self._pipeline is None:
            self._pipeline = Pipeline(
                self._plan, self._source, self._ranks, self._transform, run_id=self._run_id,
                in_place_bytes=self._transport.in_place_bytes, timeout_s=self._deadline_s,
            )  # fmt: skip

        def settled(place: str, error: Exception | None) -> None:
            if isinstance(error, EngineError):
                self._transport.finish_calls()
            settle(self._ranks, fleet, version, place, error)

        record = expectation.record if self._plan.senders[:1] == (self._plan.sender(self._ranks.rank),) else None
        while True:
            try:
                with self._contribution.left_if_broken():
                    contributes = self._prepare(version, fleet, settled, clock, self._pipeline.sources)
                    self._pipeline.run(
                        self._transport.send if fleet.engines else None,
                        settled,
                        clock,
                        on_progress,
                        record,
                        contribute=self._contribution.send if contributes else None,
                        arrived=self._transport.arrived if fleet.engines else None,
                        overlapping=self._transport.overlapping,
                    )
                    with clock("activate"):
                        _together(fleet, settled, "after the last bucket", partial(self._transport.end, version))
                return
            except SourceFailed as failed:
                with suppress(StartAgain):
                    settled(failed.place, EngineError(str(failed)) if fleet.engines else None)
            except StartAgain:
                continue

    def _prepare(self, version: int, fleet: Fleet, settled: Settle, clock: Clock, sources: list[int]) -> bool:
        """Until the first bucket can be sent; whether this rank is one of the sources beside the sender."""
        place, rank = "before the first bucket", self._ranks.rank

        def begin() -> None:
            self._transport.connect(list(fleet.engines), len(sources))
            fleet.each("pause", lambda engine: engine.pause(self._config.pause))
            self._transport.begin(version)

        with clock("pause"):
            _together(fleet, settled, place, begin)
            if len(sources) <= 1:
                return False
            group = self._ranks.gather_objects(self._transport.group if fleet.engines else None)[sources[0]]
            contributes, error = group is not None and rank in sources[1:], None
            if contributes:
                try:
                    self._contribution.join(group, sources.index(rank))
                except EngineError as raised:
                    error = raised
            settled(place, error)
        return contributes

    def _activate(
        self, version: int, fleet: Fleet, clock: Clock, expectation: Expectation, start: float
    ) -> ResyncReport:
        """Steps 4 to 6; only on rank 0 is all of the report right."""
        with clock("activate"):
            stale = sum(fleet.each_or_out("flush_cache", self._flush).values())
            fleet.each_or_out("set_version", lambda engine: engine.set_version(version))
            # Here, so that nobody's verification contains what the slowest sender still has to do.
            self._ranks.agree(0)
        with clock("verify"):
            expected, mismatching = self._verify(expectation, fleet)
            # No engine serves the version before all have it, and have it right.
            any_wrong = self._ranks.agree(int(bool(mismatching)))
        if not any_wrong:
            with clock("activate"):
                fleet.each_or_out("resume", lambda engine: engine.resume())
        assert self._pipeline is not None
        memory = self._pipeline.nbytes
        parts = self._ranks.gather_objects(
            (len(fleet.engines), fleet.failed, mismatching, stale, dict(clock.seconds), memory)
        )
        engines, failures, mismatches, stales, seconds, memories = zip(*parts, strict=True)
        failed = {name: reason for each in failures for name, reason in each.items()}
        if self._engines and not sum(engines):
            reasons = "; ".join(failed.values())
            raise ResyncError(f"resync of version {version} failed after the last bucket: no engine is left: {reasons}")
        buckets, written = self._plan.buckets, self._transport.written
        return ResyncReport(
            version=version,
            bytes=sum(bucket.sent.nbytes for bucket in buckets),
            buckets=len(buckets),
            seconds=time.monotonic() - start,
            stage_seconds={
                stage: max(each.get(stage, 0.0) for each in seconds)
                for stage in dict.fromkeys(stage for each in seconds for stage in each)
            },
            verified_tensors=expected * sum(engines),
            mismatching=tuple(name for each in mismatches for name in each),
            failed_engines=failed,
            stale_requests=sum(stales),
            peak_extra_bytes=max(memories),
            written_bytes=written.nbytes if written else None,
            changed_fraction=written.changed_fraction if written else None,
        )

    def _flush(self, engine: EngineControl) -> int:
        """Requests that go on with keys and values of the old weights, which are then not flushed."""
        running = engine.running_requests() if self._config.pause is PauseMode.in_place else 0
        if not running:
            engine.flush_cache()
        return running

    def _verify(self, expectation: Expectation, fleet: Fleet) -> tuple[int, tuple[str, ...]]:
        """(tensors compared per engine, `<engine>: <tensor>` of those that differ)."""
        names = expectation.names
        if not names:
            return 0, ()
        expected, lost = expectation.fingerprints(self._source, self._ranks)
        loaded = fleet.each_or_out("fingerprints", lambda engine: engine.fingerprints(names))
        mismatching = [f"gathering: {name}" for name in lost] if self._ranks.rank == 0 else []
        mismatching += [
            f"{engine}: {name}"
            for engine, prints in loaded.items()
            for name, value in expected.items()
            if prints.get(name) != value
        ]
        return len(names), tuple(mismatching)

    def _close_pipeline(self) -> None:
        if self._pipeline is not None:
            self._pipeline.close()
            self._pipeline = None


def _together(fleet: Fleet, settled: Settle, place: str, action: Callable[[], None]) -> None:
    """An action of the ranks with engines, and all ranks hear how it went."""
    error: Exception | None = None
    if fleet.engines:
        try:
            action()
        except (EngineError, OSError) as raised:
            error = raised
    settled(place, error)


def make_transport(
    config: ResyncConfig, plan: ResyncPlan, *, run_id: str, address: str, model_dir: Path, run_dir: Path
) -> Transport:
    """The transport that the config names, not yet connected; see ResyncSession for the arguments."""
    if config.transport is TransportName.ipc:
        return IpcTransport(config.timeout_s)
    if config.transport is TransportName.collective:
        return CollectiveTransport(
            address,
            f"slimrl-{run_id}",
            config.timeout_s,
            bucket_bytes=max((bucket.sent.nbytes for bucket in plan.buckets), default=0),
        )
    root = Path(config.dir) / run_id if config.dir else run_dir / "resync"
    specs = list({part.spec.name: part.spec for bucket in plan.buckets for part in bucket.sent.parts}.values())
    if config.transport is TransportName.disk:
        return DiskTransport(
            root, specs, model_dir, file_bytes=config.bucket_bytes, keep=config.keep, timeout_s=config.timeout_s
        )
    return DeltaTransport(
        root,
        specs,
        model_dir,
        local_dir=Path(config.local_dir) / run_id,
        full_every=config.full_every,
        encoding=config.delta_encoding,
        file_bytes=config.bucket_bytes,
        keep=config.keep,
        timeout_s=config.timeout_s,
    )
