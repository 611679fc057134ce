"""What TensorBoard and MLflow hold of a run, read back by themselves, and what is said where they are not installed."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import numpy as np
import pytest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from test_observability import trajectory

from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.run import TrackerName, TrackingConfig, WandbMode
from slimrl.config.tracking_rules import missing_trackers
from slimrl.observability.prometheus_tracker import PrometheusTracker
from slimrl.observability.run_folder import RunFolder, open_run_folder
from slimrl.observability.samples import as_markdown
from slimrl.observability.trackers import Trackers


def track(run: RunFolder, name: TrackerName) -> None:
    """A run that is killed after step 3 and goes on from its checkpoint of step 2, with other numbers."""
    settings = TrackingConfig(wandb=WandbMode.disabled, more=[name])
    with Trackers(run, settings, {"seed": 7, "stop": {"kl": None}}) as trackers:
        for step in range(4):
            trackers.log(step, {"reward/mean": 0.25 * step, "policy/loss": float("nan"), "env/a=b": np.float32(1.5)})
        trackers.log_texts(3, ["**user**\n\n    2 + 2?", "second"])
    trackers = Trackers(run, settings, {"seed": 7}, keep_through_step=2)
    trackers.log(3, {"reward/mean": 8.0})
    trackers.close(failed=True)


def test_tensorboard_has_the_numbers_and_texts_of_the_steps_that_count(tmp_path: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = open_run_folder(tmp_path, "demo", "")
    track(run, TrackerName.tensorboard)
    found = EventAccumulator(str(run.tensorboard)).Reload()
    assert [(event.step, event.value) for event in found.Scalars("reward/mean")] == [
        (0, 0.0), (1, 0.25), (2, 0.5), (3, 8.0),
    ]  # fmt: skip
    assert [event.value for event in found.Scalars("env/a=b")] == [1.5] * 3
    assert "policy/loss" not in found.Tags()["scalars"]
    (text,) = found.Tensors("trajectories/1/text_summary")
    assert (text.step, list(text.tensor_proto.string_val)) == (3, [b"second"])
    # The settings of each attempt stand where it begins.
    (settings,) = found.Tensors("config/text_summary")[-1].tensor_proto.string_val
    assert settings == b"    seed: 7\n"


def test_mlflow_has_one_run_with_its_numbers_texts_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = open_run_folder(tmp_path, "demo", "")
    track(run, TrackerName.mlflow)
    client = MlflowClient(f"sqlite:///{run.mlflow}/mlflow.db")
    (experiment,) = [one for one in client.search_experiments() if one.name == "slimrl"]
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status) == ("demo", "FAILED")
    history = client.get_metric_history(found.info.run_id, "reward/mean")
    assert {(one.step, one.value) for one in history} == {(0, 0.0), (1, 0.25), (2, 0.5), (3, 0.75), (3, 8.0)}
    assert "policy/loss" not in found.data.metrics
    assert found.data.metrics["env/a_b"] == 1.5
    files = run.mlflow / "artifacts" / found.info.run_id / "artifacts"
    assert (files / "trajectories" / "step_000003_1.md").read_text() == "second"
    assert (files / "config.yaml").read_text() == "seed: 7\n"


def test_an_mlflow_server_that_is_away_is_named_at_the_start_and_ends_no_run_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    settings = TrackingConfig(wandb=WandbMode.disabled, more=[TrackerName.mlflow])
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = open_run_folder(tmp_path, "demo", "")
    with Trackers(run, settings, {}) as trackers:

        def away(*given, **named):
            raise mlflow.MlflowException("no connection")

        monkeypatch.setattr(mlflow.MlflowClient, "log_batch", away)
        trackers.log(1, {"reward/mean": 0.5})
    assert "MLflow does not take" in caplog.text
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(ValueError, match=r"tracking\.more: MLflow at http://127\.0\.0\.1:9: "):
        Trackers(open_run_folder(tmp_path, "other", ""), settings, {})


def test_prometheus_reads_the_last_value_of_each_metric_while_the_run_lives():
    tracker = PrometheusTracker("127.0.0.1:0", 'a "run"')
    url = f"http://127.0.0.1:{tracker.port}"
    tracker.log(1, {"reward/mean": 0.25, "eval/heldout/accuracy": 0.5})
    tracker.log(2, {"reward/mean": 1e-7, "env/back\\slash\n": 3})
    with urlopen(f"{url}/metrics", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        (family,) = text_string_to_metric_families(answer.read().decode())
    with urlopen(f"{url}/engines", timeout=10) as answer:
        assert json.load(answer) == []
    assert {sample.labels["run"] for sample in family.samples} == {'a "run"'}
    found = {sample.labels["metric"]: sample.value for sample in family.samples}
    expected = {"step": 2, "reward/mean": 1e-7, "eval/heldout/accuracy": 0.5, "env/back\\slash\n": 3}
    assert (family.type, found) == ("gauge", expected)
    with pytest.raises(HTTPError, match="404"):
        urlopen(f"{url}/", timeout=10)
    with pytest.raises(ValueError, match=f"tracking.prometheus: 127.0.0.1:{tracker.port}: cannot be listened at"):
        PrometheusTracker(f"127.0.0.1:{tracker.port}", "other")
    tracker.close(failed=False)
    with pytest.raises(URLError):
        urlopen(f"{url}/metrics", timeout=10)


class FakeRun:
    """Shows one gauge and an engine."""

    def __init__(self, engine_url: str) -> None:
        self._url = engine_url

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily("slimrl_rollout_running_groups", "Groups", labels=["run"])
        family.add_metric(["demo"], 3)
        yield family

    def engine_urls(self) -> dict[str, str]:
        return {"engine 0": self._url}


def test_prometheus_finds_the_engines_and_reads_them_through_the_driver_while_the_run_shows_them():
    engine, tracker = PrometheusTracker("127.0.0.1:0", "engine"), PrometheusTracker("127.0.0.1:0", "demo")
    engine.log(1, {"tokens": 5})
    url = f"http://127.0.0.1:{tracker.port}"
    with tracker.showing(FakeRun(f"http://127.0.0.1:{engine.port}")):
        with urlopen(f"{url}/metrics", timeout=10) as answer:
            assert 'slimrl_rollout_running_groups{run="demo"} 3.0' in answer.read().decode()
        with urlopen(f"{url}/engines", timeout=10) as answer:
            [found] = json.load(answer)
        path = found["labels"].pop("__metrics_path__")
        assert found == {"targets": [f"127.0.0.1:{tracker.port}"], "labels": {"run": "demo", "engine": "engine 0"}}
        with urlopen(f"http://{found['targets'][0]}{path}", timeout=10) as answer:
            assert 'slimrl{metric="tokens",run="engine"} 5.0' in answer.read().decode()
        with pytest.raises(HTTPError, match="404"):
            urlopen(f"{url}/engines/engine%201", timeout=10)
        engine.close(failed=False)
        with pytest.raises(HTTPError, match="502"):
            urlopen(f"{url}{path}", timeout=10)
    with urlopen(f"{url}/metrics", timeout=10) as answer:
        assert "running_groups" not in answer.read().decode()
    with pytest.raises(HTTPError, match="404"):
        urlopen(f"{url}{path}", timeout=10)
    tracker.close(failed=False)


@pytest.mark.parametrize("address", ["9464x", "127.0.0.1", "127.0.0.1:99999", "no.such.host.invalid:1"])
def test_an_address_that_is_none_is_refused(address: str):
    with pytest.raises(ValueError, match=r"tracking\.prometheus"):
        PrometheusTracker(address, "run")


def test_a_tracker_that_is_not_installed_is_named_before_the_start_and_one_that_is_asked_for_alone(
    monkeypatch: pytest.MonkeyPatch,
):
    recipe = Recipe()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert list(missing_trackers(recipe, "train")) == []
    recipe.tracking.more = [TrackerName.mlflow]
    assert list(missing_trackers(recipe, "sft")) == [
        (
            "tracking.more",
            "mlflow needs the package of that name. Install it with: pip install -c requirements/lock.txt mlflow",
        )
    ]
    assert list(missing_trackers(recipe, "eval")) == []
    monkeypatch.undo()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert list(missing_trackers(recipe, "train")) == []


def test_a_conversation_for_a_tracker_is_text_without_markup_of_its_own():
    one = trajectory("p0", 0)
    one.reward = 0.5
    one.messages += [
        {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]},
        {"role": "tool", "content": "# 4\n\x1b[2J"},
    ]
    assert as_markdown(one) == (
        "reward 0.5, completed\n\n**user**\n\n    größer?\n\n"
        '**assistant**\n\n    {"tool_calls": [{"name": "add"}]}\n\n**tool**\n\n    # 4\n    \\u001b[2J'
    )
