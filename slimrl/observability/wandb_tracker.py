"""The wandb run of a run, offline by default."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from slimrl.config.schema.run import TrackingConfig, WandbMode
from slimrl.config.tracking_rules import has_wandb_key, missing_key_text
from slimrl.observability.run_folder import RunFolder

STEP = "step"
"""Name of the metric with the run's step, as in metrics.jsonl; the x-axis of all metrics in wandb."""
CONNECT_TIMEOUT_S = 60
"""Seconds that wandb's server may take to answer before the run goes on offline"""

log = logging.getLogger(__name__)


class WandbTracker:
    """See Tracker."""

    def __init__(
        self, run: RunFolder, tracking: TrackingConfig, config: Mapping[str, Any], say: Callable[[str], None]
    ) -> None:
        self._run = _start_wandb(run, tracking, config, say)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({STEP: step, **numbers})

    def log_texts(self, step: int, texts: Sequence[str]) -> None:
        import wandb

        rows = [[step, number, text] for number, text in enumerate(texts)]
        self._run.log({STEP: step, "trajectories": wandb.Table(columns=[STEP, "number", "text"], data=rows)})

    def rewind(self, step: int) -> None:
        """wandb shows the later of two values of a step."""

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=1 if failed else 0)


def _start_wandb(
    run: RunFolder, tracking: TrackingConfig, config: Mapping[str, Any], say: Callable[[str], None]
) -> Any:
    """A wandb run inside the run folder. Online without an account or a connection it goes on offline, and says so."""
    _set_up_wandb(run)
    import wandb

    start = partial(_init_wandb, run, tracking.wandb_project, config)
    if tracking.wandb is WandbMode.offline:
        return start(WandbMode.offline)
    reason = missing_key_text()
    if has_wandb_key():  # else wandb would ask for one on a terminal
        try:
            return start(WandbMode.online)
        except (wandb.Error, TimeoutError) as error:
            log.warning("wandb does not go online", exc_info=error)
            reason = _first_line(error)
            wandb.teardown()  # its process still holds the run's id
    say(f"wandb goes on offline: {reason}. Send it later: wandb sync {run.wandb}/offline-run-*")
    return start(WandbMode.offline)


def _init_wandb(run: RunFolder, project: str, config: Mapping[str, Any], mode: WandbMode) -> Any:
    """Start a wandb run, which prints nothing, and offline opens no connection.

    Raises:
        wandb.Error, TimeoutError: online mode without an account or a connection.
    """
    import wandb

    # A resumed run keeps the id.
    run_id = run.wandb / "run_id"
    if not run_id.exists():
        run_id.write_text(os.urandom(8).hex())
    started = wandb.init(
        project=project,
        name=run.path.name,
        id=run_id.read_text(),
        resume="allow" if mode is WandbMode.online else None,
        dir=str(run.path),
        mode=mode.value,
        config=dict(config),
        settings=wandb.Settings(
            init_timeout=CONNECT_TIMEOUT_S,
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            disable_job_creation=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
        ),
    )
    # wandb continues its own step count from the last process and drops metrics below it, but a resumed run starts
    # again after its checkpoint.
    started.define_metric("*", step_metric=STEP)
    return started


def _set_up_wandb(run: RunFolder) -> None:
    """Variables that wandb reads at import: its caches lie in the run folder, and it reports no errors."""
    run.wandb.mkdir(exist_ok=True)
    os.environ["WANDB_ERROR_REPORTING"] = "false"
    for name in ("CACHE", "CONFIG", "DATA", "ARTIFACT"):
        os.environ.setdefault(f"WANDB_{name}_DIR", str(run.wandb / name.lower()))
    # Else it advertises Weave where a client such as openai is imported, and connects to it where weave is.
    os.environ.setdefault("WANDB_DISABLE_WEAVE", "true")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
