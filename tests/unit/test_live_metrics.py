"""What a run shows to Prometheus of its rollout and its gateway, and the dashboard that asks for it."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from test_observability import trajectory

from slimrl.agent.gateway.activity import ABANDONED, BOUNDS_S, FAILED, REFUSED, GatewayActivity
from slimrl.data.engine import RUN_EVALUATION
from slimrl.data.trajectory import Status
from slimrl.observability.metrics import METRIC_NAMES
from slimrl.rollout.episode_counts import EpisodeCounts
from slimrl.runtime.live_metrics import LiveMetrics

DASHBOARD = Path(__file__).parents[2] / "docs" / "examples" / "grafana.json"
FAMILIES = {
    "slimrl_rollout_running_groups", "slimrl_rollout_waiting_groups", "slimrl_rollout_batch_trajectories",
    "slimrl_rollout_running_trajectories", "slimrl_rollout_tokens", "slimrl_rollout_trajectories",
    "slimrl_gateway_open_sessions", "slimrl_gateway_requests", "slimrl_gateway_request_seconds",
}  # fmt: skip


def shown(counts: EpisodeCounts, gateway: GatewayActivity) -> dict[tuple[str, ...], float]:
    """Each sample by its name and the values of its labels, without `run`."""
    service = SimpleNamespace(admission=SimpleNamespace(counts={"running": 5, "waiting": 2}), num_ended=7)
    live = LiveMetrics("demo", service, SimpleNamespace(counts=counts), dict, gateway)  # type: ignore[arg-type]
    found = {}
    for family in text_string_to_metric_families(generate_latest(live).decode()):
        assert family.name in FAMILIES
        for sample in family.samples:
            assert sample.labels.pop("run") == "demo"
            found[sample.name, *(sample.labels[name] for name in sorted(sample.labels))] = sample.value
    return found


def test_the_rollout_is_shown_by_kind_and_status():
    counts = EpisodeCounts()
    for name, status in (("step/0", Status.completed), (f"{RUN_EVALUATION}000001/0", Status.failed), ("step/1", None)):
        counts.begin(name)
        if status is not None:
            one = trajectory("p0", 0)
            one.trajectory_id, one.status = name, status
            num_tokens = sum(int(np.count_nonzero(segment.loss_mask)) for segment in one.segments)
            counts.end(name)
            counts.add(one)
    assert num_tokens > 0
    assert shown(counts, GatewayActivity()) == {
        ("slimrl_rollout_running_groups",): 5,
        ("slimrl_rollout_waiting_groups",): 2,
        ("slimrl_rollout_batch_trajectories",): 7,
        ("slimrl_rollout_running_trajectories", "train"): 1,
        ("slimrl_rollout_running_trajectories", "eval"): 0,
        ("slimrl_rollout_tokens_total", "train"): num_tokens,
        ("slimrl_rollout_tokens_total", "eval"): num_tokens,
        ("slimrl_rollout_trajectories_total", "train", "completed"): 1,
        ("slimrl_rollout_trajectories_total", "eval", "failed"): 1,
    }


def test_the_gateway_is_shown_with_a_histogram_of_its_answers():
    one = GatewayActivity()
    for _ in range(3):
        one.open()
    one.end()
    answers_s = (0.1, 0.2, 3.0, 1000.0)
    for seconds in answers_s:
        one.answer(seconds)
    one.requests[REFUSED] += 2
    found = shown(EpisodeCounts(), one)
    assert found["slimrl_gateway_open_sessions",] == 2
    outcomes = {key[1]: value for key, value in found.items() if key[0] == "slimrl_gateway_requests_total"}
    assert outcomes == {"answered": 4, REFUSED: 2, FAILED: 0, ABANDONED: 0}
    buckets = {float(key[1]): value for key, value in found.items() if key[0].endswith("_bucket")}
    # Prometheus counts what is at most a bound.
    assert buckets == {bound: sum(seconds <= bound for seconds in answers_s) for bound in (*BOUNDS_S, float("inf"))}
    assert found["slimrl_gateway_request_seconds_count",] == 4
    assert found["slimrl_gateway_request_seconds_sum",] == pytest.approx(sum(answers_s))


def test_every_metric_that_the_dashboard_asks_for_is_one_of_a_run():
    board = json.loads(DASHBOARD.read_text())
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    rows = [panel["title"] for panel in board["panels"] if panel["type"] == "row"]
    assert [row.split()[0] for row in rows] == ["Reward", "Time", "Rollout", "Engines", "Gateway", "Mismatch"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    names = [re.sub("<.*?>", "x", name) for name in METRIC_NAMES]
    asked = set()
    for expression in expressions:
        families = set(re.findall(r"\b((?:slimrl|sglang:)\w*)\{", expression))
        assert families, expression
        asked |= families
        if families == {"slimrl"}:
            [(operator, metric)] = re.findall(r'metric(=~?)"(.*?)"', expression)
            wanted = re.compile(metric if operator == "=~" else re.escape(metric))
            found = {name for name in names if wanted.fullmatch(name)}
            assert len(found) >= metric.count("|") + 1, expression
    assert {re.sub("_(total|bucket)$", "", name) for name in asked if name.startswith("slimrl_")} == FAMILIES
    collector = "sglang/srt/observability/metrics_collector.py"
    source = next(path for path in map(Path, sys.path) if (path / collector).is_file()) / collector
    for name in asked:
        if name.startswith("sglang:"):
            assert f'name="{name}"' in source.read_text()
