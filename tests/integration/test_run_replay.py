"""A run in bfloat16 whose trainer takes the engines' experts: no flip is left, and the mismatch falls."""

import pytest
from cli_runs import RECIPES, make_workspace, succeed
from slimrl_tools.toy.toy import ToySize

from slimrl.observability.metrics import read_metrics

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(600)]

MODEL = ToySize(layers=4, hidden=64, moe_intermediate=64, init_std=0.1)
"""Rounding in bfloat16 moves its router scores past each other often, and its experts differ."""
SETTINGS = [
    "run.name=gspo",
    "steps=2",
    "trainer.precision=bf16",
    # A later update measures also how far the policy has moved.
    "trainer.updates_per_rollout=1",
    "rollout.num_engines=1",
    "rollout.routed_experts=true",
    "algorithm.max_logprob_mismatch=0.5",
    "algorithm.routing_replay=rollout",
    "algorithm.replay_gap_every_steps=1",
]


def test_replay_of_the_engines_experts_leaves_no_flip_and_less_mismatch(tmp_path):
    workspace = make_workspace(tmp_path, size=MODEL)
    done = succeed("train", str(RECIPES / "gspo_calculator.yaml"), *workspace.overrides(*SETTINGS), timeout_s=400.0)
    assert "expert load  dead experts" in done.stdout
    steps = [line for line in read_metrics(workspace.run_folder("gspo").metrics) if "policy/loss" in line]
    assert len(steps) == 2
    for line in steps:
        assert line["mismatch/routing_flips"] == line["routing/differs_fraction"] == 0
        assert line["routing/replayed_fraction"] == 1
        assert line["routing/unreplayed_differs_fraction"] > 0.002
        # Given the engine's experts below, no more tokens differ than where differences add up over the layers.
        assert 0.002 < line["routing/replay_changed_fraction"] <= 1.5 * line["routing/unreplayed_differs_fraction"]
        assert line["mismatch/logprob_abs_mean"] < line["routing/unreplayed_logprob_abs_mean"], line
        assert line["moe/expert_load_worst"] >= line["moe/expert_load_max_over_mean"] >= 1
        assert line["moe/expert_load_worst_layer"] in range(4)
