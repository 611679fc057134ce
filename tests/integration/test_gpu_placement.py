"""Which GPUs the processes of a run get, on nodes that count GPUs without having any."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ray_nodes import RayNodes

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(300)]


def test_every_rank_has_a_gpu_of_its_own_and_an_engine_those_of_the_ranks_that_it_shares_with():
    nodes = RayNodes(2, 2, gpus=True)
    try:
        output = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("placed_actors.py")), nodes.address],
            env={**os.environ, **nodes.environment},
            check=True,
            capture_output=True,
            text=True,
            timeout=200,
        ).stdout
    finally:
        nodes.close()
    seen = json.loads(output.splitlines()[-1])
    assert seen["resource"] == "GPU"
    assert [node for node, _ in seen["ranks"]] == seen["rank_nodes"]
    assert len({(node, *gpus) for node, gpus in seen["ranks"]}) == 4
    assert {gpu for _, gpus in seen["ranks"] for gpu in gpus} == {"0", "1"}
    assert len({engine["node"] for engine in seen["engines"]}) == 2
    for engine, (node, gpus) in zip(seen["engines"], seen["ranks"][::2], strict=True):
        assert (engine["node"], engine["own"]) == (node, gpus)
        assert set(engine["devices"]) == {"0", "1"}
