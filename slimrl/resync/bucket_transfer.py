"""Versions that travel in buckets, which rank 0 gathers from all nodes and sends: `disk` and `delta`.

Begin; then bucket by bucket gather, transform, send, where a bucket is sent and loaded while the next is gathered; end,
when every engine has the whole version. After a fault, engines that give no sign of life or failed twice are taken out,
and the version starts again for the others.
"""

from collections.abc import Sequence
from pathlib import Path

from slimrl.config.schema.resync import ResyncConfig, TransportName
from slimrl.data.model_weights import EngineControl, WeightSource
from slimrl.resync.buckets import Transform
from slimrl.resync.engine_calls import EngineCalls
from slimrl.resync.expected_fingerprints import ExpectedFingerprints
from slimrl.resync.pipeline import Pipeline
from slimrl.resync.plan import ResyncPlan, plan_resync
from slimrl.resync.ranks import Ranks, StartAgain, sync_errors_across_ranks
from slimrl.resync.report import Clock
from slimrl.resync.steps import together
from slimrl.resync.transfer import Progress, Transfer
from slimrl.resync.transports.base import Transport
from slimrl.resync.transports.disk import DiskTransport


class BucketTransfer(Transfer):
    """Implements Transfer.

    Args:
        deadline_s: of each wait for another rank.
        transport: None for the one that the config names.

    Raises:
        ValueError: tensors do not go into buckets of this size.
    """

    def __init__(
        self,
        source: WeightSource,
        ranks: Ranks,
        engines: Sequence[EngineControl],
        config: ResyncConfig,
        *,
        run_id: str,
        deadline_s: float,
        transport: Transport | None,
        model_dir: Path,
        run_dir: Path,
        transform: Transform | None,
    ) -> None:
        self._source, self._ranks, self._config, self._run_id = source, ranks, config, run_id
        self._deadline_s, self._engines = deadline_s, list(engines)
        self._plan = plan_resync(source.layout(), ranks.nodes, bucket_bytes=config.bucket_bytes, transform=transform)
        self._transport = transport or make_transport(
            config, self._plan, run_id=run_id, model_dir=model_dir, run_dir=run_dir
        )
        self._pipeline: Pipeline | None = None

    def use(self, engines: Sequence[EngineControl]) -> None:
        self._engines = list(engines)

    def mine(self) -> list[EngineControl]:
        return list(self._engines) if self._ranks.rank == 0 else []

    @property
    def sent_bytes(self) -> int:
        return sum(bucket.sent_bytes for bucket in self._plan.buckets)

    @property
    def parts(self) -> int:
        return len(self._plan.buckets)

    @property
    def nbytes(self) -> int:
        return self._pipeline.nbytes if self._pipeline else 0

    @property
    def written_bytes(self) -> int | None:
        return self._transport.written_bytes

    @property
    def changed_fraction(self) -> float | None:
        return self._transport.changed_fraction

    def run(
        self,
        version: int,
        calls: EngineCalls,
        clock: Clock,
        expected: ExpectedFingerprints,
        on_progress: Progress | None,
    ) -> None:
        if self._pipeline is None:
            self._pipeline = Pipeline(
                self._plan, self._source, self._ranks, run_id=self._run_id, timeout_s=self._deadline_s
            )

        def sync_errors(place: str, error: Exception | None) -> None:
            sync_errors_across_ranks(self._ranks, calls, version, place, error)

        def prepare() -> None:
            if calls.engines:
                calls.each("pause", lambda engine: engine.pause(self._config.pause))
                self._transport.begin(version, list(calls.engines))

        def end() -> None:
            if calls.engines:
                self._transport.end(version)

        while True:
            try:
                with clock("pause"):
                    together(sync_errors, "before the first bucket", prepare)
                send = self._transport.send if calls.engines else None
                self._pipeline.run(send, sync_errors, clock, on_progress, expected.record)
                with clock("activate"):
                    together(sync_errors, "after the last bucket", end)
                return
            except StartAgain:
                continue

    def close(self) -> None:
        if self._pipeline is not None:
            self._pipeline.close()
            self._pipeline = None
        self._transport.close()


def make_transport(config: ResyncConfig, plan: ResyncPlan, *, run_id: str, model_dir: Path, run_dir: Path) -> Transport:
    """The transport that the config names; see ResyncSession for the arguments."""
    root = Path(config.dir) / run_id if config.dir else run_dir / "resync"
    specs = list({part.spec.name: part.spec for bucket in plan.buckets for part in bucket.sent}.values())
    local_dir = Path(config.local_dir) / run_id if config.transport is TransportName.delta else None
    return DiskTransport(root, specs, model_dir, config, local_dir)
