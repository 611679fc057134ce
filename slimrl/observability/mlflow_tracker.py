"""The MLflow run of a run: a database in the run folder, or a server that MLFLOW_TRACKING_URI names."""

import importlib
import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

EXPERIMENT = "slimrl"
"""Name of the experiment that the runs are in"""
METRICS_AT_ONCE = 1000
"""Largest number of metrics that MLflow takes in one call"""
_NOT_IN_NAMES = re.compile(r"[^\w\-. /]")
"""Characters that MLflow refuses in the names of metrics"""

log = logging.getLogger(__name__)


class MlflowTracker:
    """See Tracker. What a server does not take is left out and logged: the run goes on."""

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any]) -> None:
        """
        Args:
            folder: of the run's id, so that a resumed run keeps it, and of the database and its artifacts.
            name: of the run.

        Raises:
            ValueError: the server cannot be reached, or refuses the run.
        """
        self._mlflow = importlib.import_module("mlflow")
        folder.mkdir(exist_ok=True)
        server = os.environ.get("MLFLOW_TRACKING_URI")
        artifacts = None if server else (folder.absolute() / "artifacts").as_uri()
        try:
            self._client = self._mlflow.MlflowClient(server or f"sqlite:///{folder.absolute()}/mlflow.db")
            self._run_id = self._open(folder / "run_id", name, artifacts)
            self._client.log_dict(self._run_id, dict(config), "config.yaml")
        except self._mlflow.MlflowException as error:
            raise ValueError(f"tracking.more: MLflow at {server or folder}: {error}") from error

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        now_ms, metric = int(1000 * time.time()), self._mlflow.entities.Metric
        metrics = [metric(_NOT_IN_NAMES.sub("_", name), number, now_ms, step) for name, number in numbers.items()]
        for start in range(0, len(metrics), METRICS_AT_ONCE):
            self._send(self._client.log_batch, metrics=metrics[start : start + METRICS_AT_ONCE])

    def log_texts(self, step: int, texts: Sequence[str]) -> None:
        for number, text in enumerate(texts):
            self._send(self._client.log_text, text, f"trajectories/step_{step:06d}_{number}.md")

    def rewind(self, step: int) -> None:
        """MLflow shows all values of a step."""

    def close(self, *, failed: bool) -> None:
        self._send(self._client.set_terminated, "FAILED" if failed else "FINISHED")

    def _open(self, id_file: Path, name: str, artifacts: str | None) -> str:
        """The run's id, of a new run or of the one that goes on."""
        if id_file.exists():
            run_id = id_file.read_text()
            self._client.update_run(run_id, status="RUNNING")
            return run_id
        found = self._client.get_experiment_by_name(EXPERIMENT)
        experiment = found.experiment_id if found else self._client.create_experiment(EXPERIMENT, artifacts)
        run_id = str(self._client.create_run(experiment, run_name=name).info.run_id)
        id_file.write_text(run_id)
        return run_id

    def _send(self, call: Callable[..., Any], *given: Any, **named: Any) -> None:
        try:
            call(self._run_id, *given, **named)
        except self._mlflow.MlflowException as error:
            log.warning("MLflow does not take %s", call.__name__, exc_info=error)
