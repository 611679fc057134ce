"""Metrics go to metrics.jsonl, and to the trackers of the section `tracking`: wandb, TensorBoard, MLflow,
Prometheus."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Protocol, Self

from slimrl.config.schema.run import TrackerName, TrackingConfig, WandbMode
from slimrl.observability.metrics import MetricsWriter, plain_number
from slimrl.observability.mlflow_tracker import MlflowTracker
from slimrl.observability.prometheus_tracker import Live, PrometheusTracker
from slimrl.observability.run_folder import RunFolder
from slimrl.observability.tensorboard_tracker import TensorboardTracker
from slimrl.observability.wandb_tracker import WandbTracker

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """A program that shows runs. A step may come after a later one."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add finite numbers of a step."""

    def log_texts(self, step: int, texts: Sequence[str]) -> None:
        """Add conversations of a step, as Markdown."""

    def rewind(self, step: int) -> None:
        """Hide what is there of later steps, which come again."""

    def close(self, *, failed: bool) -> None: ...


class Trackers:
    """The metrics file and the trackers of one run."""

    def __init__(
        self,
        run: RunFolder,
        tracking: TrackingConfig,
        config: Mapping[str, Any],
        *,
        keep_through_step: int | None = None,
        say: Callable[[str], None] = log.warning,
    ) -> None:
        """Args:
        config: the resolved recipe for the trackers, as nested plain Python without secrets, see resolved_dict.
        keep_through_step: as for MetricsWriter.
        say: shows the user a line.
        """
        self._path = run.metrics
        self._metrics = MetricsWriter(run.metrics, keep_through_step=keep_through_step)
        self._trackers: list[Tracker] = []
        if tracking.wandb is not WandbMode.disabled:
            self._trackers.append(WandbTracker(run, tracking, config, say))
        if TrackerName.tensorboard in tracking.more:
            self._trackers.append(TensorboardTracker(run.tensorboard, config, keep_through_step))
        if TrackerName.mlflow in tracking.more:
            self._trackers.append(MlflowTracker(run.mlflow, run.path.name, config))
        self._prometheus = None
        if tracking.prometheus:
            self._prometheus = PrometheusTracker(tracking.prometheus, run.path.name)
            self._trackers.append(self._prometheus)

    def showing(self, live: Live) -> AbstractContextManager[None]:
        """Show within the block what the run does, to trackers that ask."""
        return nullcontext() if self._prometheus is None else self._prometheus.showing(live)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics of a step, which may be before the last one."""
        self._metrics.log(step, metrics)
        finite = {name: number for name, value in metrics.items() if (number := plain_number(value)) is not None}
        for tracker in self._trackers:
            tracker.log(step, finite)

    def log_texts(self, step: int, texts: Sequence[str]) -> None:
        """Give the trackers conversations of a step, as Markdown."""
        for tracker in self._trackers:
            tracker.log_texts(step, texts)

    def rewind(self, step: int) -> None:
        """Remove what was recorded of steps after this one, which come again."""
        self._metrics.close()
        self._metrics = MetricsWriter(self._path, keep_through_step=step)
        for tracker in self._trackers:
            tracker.rewind(step)

    def close(self, *, failed: bool = False) -> None:
        self._metrics.close()
        trackers, self._trackers = self._trackers, []
        for tracker in trackers:
            tracker.close(failed=failed)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=error is not None)
