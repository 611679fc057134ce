"""Sandboxes on two nodes of a Ray cluster: they share the runs, refuse too many, and one of them is lost."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from ray_nodes import RayNodes

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def said() -> dict[str, list[str]]:
    nodes = RayNodes(1, 1)
    try:
        (raylet,) = [process for process in nodes.members(1) if Path(process.cmdline()[0]).name == "raylet"]
        script = Path(__file__).with_name("spread_sandboxes.py")
        command = [sys.executable, str(script), nodes.address, str(raylet.pid)]
        done = subprocess.run(
            command, env=os.environ | nodes.environment, capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])
    finally:
        nodes.close()


def test_runs_are_shared_out_between_the_nodes(said):
    assert sorted(Counter(said["parents"]).values()) == [2, 2], said["parents"]


def test_programs_end_at_their_limits_on_another_node_too(said):
    assert said["refused"] == ["ValueError", " timeout"]


def test_each_node_refuses_what_would_pile_up(said):
    """Two nodes, of which each runs two at a time and has two waiting."""
    assert Counter(said["many"]) == {" ok": 8, "SandboxBusy": 2}


def test_a_lost_node_takes_its_own_runs_alone(said):
    assert Counter(said["lost"]) == {"1 ok": 1, "SandboxError": 1}
    assert len(set(said["later"])) == 1
    assert set(said["later"]) < set(said["parents"])
