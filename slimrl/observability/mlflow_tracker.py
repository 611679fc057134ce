"""The MLflow run of a run: a database in the run folder, or a server that MLFLOW_TRACKING_URI names."""

import importlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

EXPERIMENT = "slimrl"
"""Name of the experiment that the runs are in"""
METRICS_AT_ONCE = 1000
"""Largest number of metrics that MLflow takes in one call"""
_NOT_IN_NAMES = re.compile(r"[^\w\-. /]")
"""Characters that MLflow refuses in the names of metrics"""


class MlflowTracker:
    """See Tracker."""

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any]) -> None:
        """
        Args:
            folder: of the run's id, so that a resumed run keeps it, and of the database and its artifacts.
            name: of the run.
        """
        self._mlflow = importlib.import_module("mlflow")
        folder.mkdir(exist_ok=True)
        server, artifacts = os.environ.get("MLFLOW_TRACKING_URI"), None
        if not server:
            artifacts = (folder.absolute() / "artifacts").as_uri()
        self._client = self._mlflow.MlflowClient(server or f"sqlite:///{folder.absolute()}/mlflow.db")
        run_id = folder / "run_id"
        if run_id.exists():
            self._run_id = run_id.read_text()
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            found = self._client.get_experiment_by_name(EXPERIMENT)
            experiment = found.experiment_id if found else self._client.create_experiment(EXPERIMENT, artifacts)
            self._run_id = self._client.create_run(experiment, run_name=name).info.run_id
            run_id.write_text(self._run_id)
        self._client.log_dict(self._run_id, dict(config), "config.yaml")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        now_ms, metric = int(1000 * time.time()), self._mlflow.entities.Metric
        metrics = [metric(_NOT_IN_NAMES.sub("_", name), number, now_ms, step) for name, number in numbers.items()]
        for start in range(0, len(metrics), METRICS_AT_ONCE):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + METRICS_AT_ONCE])

    def log_texts(self, step: int, texts: Sequence[str]) -> None:
        for number, text in enumerate(texts):
            self._client.log_text(self._run_id, text, f"trajectories/step_{step:06d}_{number}.md")

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")
