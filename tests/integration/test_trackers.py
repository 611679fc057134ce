"""wandb's real process and a worker's redirected output."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

TRACK = """
import os, sys
from pathlib import Path
import psutil
from slimrl.config.schema.run import TrackingConfig
from slimrl.observability.run_folder import open_run_folder
from slimrl.observability.trackers import Trackers
run = open_run_folder(Path("runs"), "demo", "seed: 1")
with Trackers(run, TrackingConfig(), {"seed": 1}) as trackers:
    trackers.log(0, {"reward/mean": 0.5, "policy/loss": float("nan")})
    print(" ".join(str(child.pid) for child in psutil.Process().children(recursive=True)), flush=True)
    if sys.argv[1] == "wait":
        sys.stdin.read()
"""


def start(folder, argument: str) -> subprocess.Popen:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")} | {
        "HOME": str(folder)
    }
    return subprocess.Popen(
        [sys.executable, "-c", TRACK, argument], cwd=folder, env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def wait_until_gone(pids: list[int], deadline_s: float) -> list[int]:
    """Those of the processes that outlive the deadline."""
    end = time.monotonic() + deadline_s
    while (alive := [pid for pid in pids if psutil.pid_exists(pid)]) and time.monotonic() < end:
        time.sleep(0.1)
    return alive


def test_offline_wandb_writes_into_the_run_folder_alone_prints_nothing_and_ends(tmp_path):
    process = start(tmp_path, "end")
    output, errors = process.communicate(timeout=100)
    assert (process.returncode, errors) == (0, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs"]
    assert len(list((tmp_path / "runs" / "demo" / "wandb").glob("offline-run-*/*.wandb"))) == 1
    line = json.loads((tmp_path / "runs" / "demo" / "metrics.jsonl").read_text())
    assert line == {"step": 0, "reward/mean": 0.5, "policy/loss": None}
    assert wait_until_gone([int(pid) for pid in output.split()], 20) == []


def test_a_killed_run_leaves_no_wandb_process(tmp_path):
    process = start(tmp_path, "wait")
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert pids
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert wait_until_gone(pids, 30) == []


def test_a_workers_output_goes_to_its_log_whatever_writes_it(tmp_path):
    code = (
        "import logging, os, pathlib, subprocess, sys\n"
        "from slimrl.observability.logs import capture_output\n"
        "capture_output(pathlib.Path('logs/worker.log'))\n"
        "print('printed', flush=True)\n"
        "os.write(2, b'raw\\n')\n"
        "logging.getLogger('x').info('logged')\n"
        "subprocess.run(['echo', 'child'], check=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == ("", "")
    lines = (tmp_path / "logs" / "worker.log").read_text().splitlines()
    assert [line.split()[-1] for line in lines] == ["printed", "raw", "logged", "child"]
