"""wandb itself, without a key and without a server."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

RUN = """
import logging
import sys
from pathlib import Path
from slimrl.config.schema.run import TrackingConfig, WandbMode
from slimrl.observability import trackers, wandb_tracker
from slimrl.observability.run_folder import open_run_folder

logging.getLogger().addHandler(logging.NullHandler())
wandb_tracker.CONNECT_TIMEOUT_S = 5
run = open_run_folder(Path(sys.argv[1]), "demo", "")
with trackers.Trackers(run, TrackingConfig(wandb=WandbMode.online), {}, say=print) as trackers:
    trackers.log(1, {"reward/mean": 0.5})
"""


@pytest.mark.parametrize(("key", "listens"), [("k" * 40, False), ("k" * 40, True), ("too short", False)])
def test_online_without_an_account_or_a_server_becomes_an_offline_run(tmp_path: Path, key: str, listens: bool):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        if listens:
            nobody.listen()  # and never answers, as behind a firewall
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
        environment |= {"WANDB_BASE_URL": url, "NETRC": str(tmp_path / "netrc"), "WANDB_API_KEY": key}
        ended = subprocess.run(
            [sys.executable, "-c", RUN, str(tmp_path)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    assert ended.returncode == 0, ended.stderr
    (line,) = ended.stdout.splitlines()
    assert line.startswith("wandb goes on offline: ")
    assert line.endswith(f"Send it later: wandb sync {tmp_path}/demo/wandb/offline-run-*")
    assert "Traceback" not in ended.stderr
    assert list((tmp_path / "demo" / "wandb").glob("offline-run-*/*.wandb"))
