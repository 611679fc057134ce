"""A server process that ended is reported with the cause that its log has."""

import re
import sys
import time
from pathlib import Path

import pytest
from cli_runs import SIZE
from engine_probes import KEY
from slimrl_tools.toy.toy import write_toy

from slimrl.config.schema.precision import Precision
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.engines.servers.process import ServerError, ServerProcess
from slimrl.engines.servers.server import EngineServer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

RAISES_AND_IS_KILLED = """
import os, signal, traceback
try:
    {}["weights"]
except KeyError:
    traceback.print_exc()
os.kill(os.getpid(), signal.SIGKILL)
"""


def ending(process: ServerProcess, timeout_s: float = 30.0) -> str:
    """What `check` raises once the process has ended."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            process.check()
        except ServerError as error:
            return str(error)
        time.sleep(0.02)
    raise AssertionError("it goes on")


def test_a_process_ended_by_a_signal_is_shown_with_the_error_in_its_log(tmp_path: Path):
    log = tmp_path / "server.log"
    process = ServerProcess("engine 7", [sys.executable, "-c", RAISES_AND_IS_KILLED], {}, log)
    try:
        told = ending(process)
    finally:
        process.stop()
    assert told == f"engine 7 was ended by SIGKILL; the last error in its log: KeyError: 'weights' (log: {log})"


@pytest.mark.full
def test_an_engine_whose_worker_raises_while_it_starts_names_the_workers_error(tmp_path: Path):
    write_toy("qwen3_moe", tmp_path / "model", SIZE, 0)
    # A cache without room for a request, which each scheduler sees when it has loaded the model.
    rollout = RolloutConfig(
        max_trajectory_tokens=64, engine_tp=2, startup_timeout_s=200, sglang={"max_total_tokens": 1}
    )
    server = EngineServer(0, rollout, tmp_path / "model", tmp_path / "engine.log", precision=Precision.fp32, key=KEY)
    try:
        with pytest.raises(ServerError) as raised:
            server.wait_ready()
    finally:
        server.stop()
    assert re.match(r"engine 0 was ended by SIGKILL; the last error in its log: \w+Error: .+", str(raised.value))
