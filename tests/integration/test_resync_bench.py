"""`slimrl resync bench` from the command line, on a model of 60 MB."""

import json
import subprocess
import sys

import pytest
from cli_runs import RECIPES

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(300)]

BUCKET_BYTES = 8_000_000


@pytest.mark.parametrize("transport", ["ipc", "p2p"])
def test_a_real_resync_is_measured(tmp_path, transport):
    arguments = [
        f"run.dir={tmp_path / 'runs'}",
        f"resync.transport={transport}",
        f"resync.bucket_bytes={BUCKET_BYTES}",
        "--family=qwen3_moe",
        "--gigabytes=0.06",
        "--repeats=2",
        "--json",
    ]
    command = [sys.executable, "-m", "slimrl.cli", "resync", "bench", str(RECIPES / "gspo_calculator.yaml"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["bytes"] == pytest.approx(60e6, rel=0.1)
    assert result["buckets"] >= result["bytes"] / BUCKET_BYTES
    assert result["fingerprints_equal"] is True
    # Two engines have every tensor.
    assert result["verified_tensors"] == 2 * 231
    assert result["gb_per_s"] == pytest.approx(result["bytes"] / 1e9 / result["seconds"])
    # The mean of two, so what was true of each is true of it.
    stages = result["stage_seconds"]
    assert stages["pause"] + stages["activate"] < result["seconds"]
    assert stages["verify"] == result["verify_seconds"]
    assert result["disk_seconds"] == pytest.approx(result["export_seconds"] + result["reload_seconds"])
    assert result["memcpy_gb_per_s"] > 0.1
    # Two ranks' own allocations come on top of the buffers.
    assert result["planned_extra_bytes"] <= result["peak_extra_bytes"] < 2 * BUCKET_BYTES + 20e6
