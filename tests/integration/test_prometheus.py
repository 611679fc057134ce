"""What Prometheus reads of a run under way: its rollout, its gateway, and SGLang's own metrics through the driver."""

import json
import re
import socket
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from cli_runs import RECIPES, CliRun, make_workspace
from prometheus_client.parser import text_string_to_metric_families

from slimrl.observability.metrics import read_metrics

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(900)]

DASHBOARD = Path(__file__).parents[2] / "docs" / "examples" / "grafana.json"


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def read(url: str) -> dict[tuple[str, ...], float]:
    """All samples by their name and labels, as `name=value`."""
    with urlopen(url, timeout=10) as answer:
        text = answer.read().decode()
    return {
        (sample.name, *(f"{name}={value}" for name, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_rollout_gateway_and_engines_are_read_at_one_address_while_a_run_goes_on(tmp_path: Path):
    workspace, port = make_workspace(tmp_path), free_port()
    asked = workspace.overrides(
        "run.name=watched", "steps=3", "rollout.num_engines=1", f"tracking.prometheus=127.0.0.1:{port}",
    )  # fmt: skip
    run = CliRun(["train", str(RECIPES / "gspo_calculator_gateway.yaml"), *asked])
    base, seen, engines, most_open = f"http://127.0.0.1:{port}", {}, {}, 0.0
    try:
        while run.process.poll() is None:
            try:
                found = read(f"{base}/metrics")
                seen |= found
                most_open = max([most_open, *(value for key, value in found.items() if "open_sessions" in key[0])])
                with urlopen(f"{base}/engines", timeout=10) as answer:
                    for one in json.load(answer):
                        assert one["labels"]["engine"] == "engine 0"
                        engines |= read(f"http://{one['targets'][0]}{one['labels']['__metrics_path__']}")
            except (URLError, ConnectionError):
                pass  # it starts or has ended
            time.sleep(0.2)
        assert run.wait(60) == 0, run.stderr
        assert not run.left()
    finally:
        run.close()
    lines = read_metrics(workspace.run_folder("watched").metrics)
    of_step = {key[1].removeprefix("metric="): value for key, value in seen.items() if key[0] == "slimrl"}
    assert of_step["step"] >= 2
    assert lines[int(of_step["step"])]["reward/mean"] == of_step["reward/mean"]

    [answered] = (
        value for key, value in seen.items() if key[0].endswith("requests_total") and "outcome=answered" in key
    )
    # A scrape misses what came after it.
    requests = sum(line.get("gateway/requests", 0) for line in lines)
    assert 0 < answered <= requests
    assert seen["slimrl_gateway_request_seconds_count", "run=watched"] == answered
    assert most_open > 0
    ended = sum(value for key, value in seen.items() if key[0] == "slimrl_rollout_trajectories_total")
    assert 16 <= ended <= 3 * 16
    tokens = sum(value for key, value in seen.items() if key[0] == "slimrl_rollout_tokens_total")
    assert 0 < tokens <= sum(line.get("rollout/tokens", 0) for line in lines)

    # The engine is read a moment after the driver, and may be read a last time before it.
    [generated] = (value for key, value in engines.items() if key[0] == "sglang:generation_tokens_total")
    assert 0.5 * tokens <= generated <= sum(line.get("rollout/tokens", 0) for line in lines)
    expressions = [
        target["expr"] for panel in json.loads(DASHBOARD.read_text())["panels"] for target in panel.get("targets", ())
    ]
    for name in {name for text in expressions for name in re.findall(r"\b((?:slimrl|sglang:)\w*)\{", text)}:
        assert name in {key[0] for key in (*seen, *engines)}, name
    # No engine leaves the files behind in which its processes share their counts.
    pids = {str(process.pid) for process in run.family}
    assert not [path for path in Path("/dev/shm").glob("slimrl-metrics_*") if path.name.split("-")[-2] in pids]
