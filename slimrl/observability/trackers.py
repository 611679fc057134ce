"""Where metrics go: metrics.jsonl always, wandb as the recipe says (offline unless it says otherwise)."""

import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from slimrl.config.schema import TrackingConfig, WandbMode
from slimrl.observability.metrics import MetricsWriter, plain_number
from slimrl.observability.run_folder import RunFolder

STEP = "step"
"""Of a run, as in metrics.jsonl; wandb draws all metrics over it."""


class WandbTracker:
    """A wandb run inside the run folder; it prints nothing, and in offline mode it contacts nobody."""

    def __init__(self, run: RunFolder, mode: WandbMode, project: str, config: Mapping[str, Any]) -> None:
        """Start wandb's own process.

        Raises:
            wandb.Error: online mode without an account or a connection.
        """
        self._prepare(run)
        import wandb

        settings = wandb.Settings(
            init_timeout=60,
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            disable_job_creation=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
        )
        self._run = wandb.init(
            project=project,
            name=run.path.name,
            id=self._run_id(run),
            resume="allow" if mode is WandbMode.online else None,
            dir=str(run.path),
            mode=mode.value,
            config=dict(config),
            settings=settings,
        )
        # wandb's own count goes on where the last process left it, and drops what is logged below that; the steps of a
        # resumed run begin after its checkpoint.
        self._run.define_metric("*", step_metric=STEP)

    @staticmethod
    def _prepare(run: RunFolder) -> None:
        """Keep wandb's caches in the run folder and its error reports at home; wandb reads these at import."""
        run.wandb.mkdir(exist_ok=True)
        os.environ["WANDB_ERROR_REPORTING"] = "false"
        for name in ("CACHE", "CONFIG", "DATA", "ARTIFACT"):
            os.environ.setdefault(f"WANDB_{name}_DIR", str(run.wandb / name.lower()))

    @staticmethod
    def _run_id(run: RunFolder) -> str:
        """The id that a resumed run shares with the run that it continues."""
        path = run.wandb / "run_id"
        if not path.exists():
            path.write_text(os.urandom(8).hex())
        return path.read_text()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        finite = {name: number for name, value in metrics.items() if (number := plain_number(value)) is not None}
        self._run.log({STEP: step, **finite})

    def close(self, exit_code: int) -> None:
        """Flush and end wandb's process."""
        self._run.finish(exit_code=exit_code)


class Trackers:
    """The metrics file of a run and what else follows it, as one."""

    def __init__(
        self,
        run: RunFolder,
        tracking: TrackingConfig,
        config: Mapping[str, Any],
        *,
        keep_through_step: int | None = None,
    ) -> None:
        """Open them.

        Args:
            run: an open run folder.
            tracking: the recipe's section.
            config: the resolved recipe as nested plain Python, shown by wandb; without secrets, see resolved_dict.
            keep_through_step: as for MetricsWriter.
        """
        self._metrics = MetricsWriter(run.metrics, keep_through_step=keep_through_step)
        self._wandb = None
        if tracking.wandb is not WandbMode.disabled:
            self._wandb = WandbTracker(run, tracking.wandb, tracking.wandb_project, config)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step everywhere; call it once per step, with everything that is known of it."""
        self._metrics.log(step, metrics)
        if self._wandb is not None:
            self._wandb.log(step, metrics)

    def close(self, *, failed: bool = False) -> None:
        self._metrics.close()
        if self._wandb is not None:
            self._wandb.close(1 if failed else 0)
            self._wandb = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=error is not None)
