"""`slimrl resync estimate` on the recipes of large models, whose checkpoints are not here."""

import json
import time
from pathlib import Path

import pytest
from published_sizes import PUBLISHED_SIZES
from typer.testing import CliRunner

from slimrl.cli import app

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

RECIPES = Path(__file__).parents[2] / "recipes"
LARGE = {
    "qwen3_moe/qwen3_30b_a3b_gspo.yaml": "Qwen3-30B-A3B",
    "qwen3_moe/qwen3_235b_a22b_gspo.yaml": "Qwen3-235B-A22B",
    "deepseek_v3/deepseek_v3_gspo_disaggregated.yaml": "DeepSeek-V3",
    "deepseek_v3/kimi_k2_gspo_disaggregated.yaml": "Kimi-K2",
}
ON_TWO_NODES = [
    "rollout.engine_tp=16",
    "rollout.engine_ep=16",
    "rollout.engine_nodes=2",
    "rollout.engine_attention_dp=1",
]
THOUSAND_RANKS = [
    "model.path=models/Kimi-K2-BF16",
    "trainer.num_ranks=1024",
    "resync.transport=ipc",
    "rollout.num_engines=128",
    "rollout.engine_tp=8",
    "rollout.engine_ep=8",
]


def estimate(*arguments: str) -> dict:
    result = CliRunner().invoke(app, ["resync", "estimate", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("recipe", [next(iter(LARGE)), *(pytest.param(name, marks=pytest.mark.full) for name in LARGE)])
def test_every_parameter_of_a_published_model_is_sent_once(recipe):
    # Where the recipe has a checkpoint in block FP8, the plain one instead.
    found = estimate(str(RECIPES / recipe), f"model.path=models/{LARGE[recipe]}-BF16")
    assert LARGE[recipe] in found["model"]
    assert found["gathered_bytes"] == found["sent_bytes"]
    # Rounded as published; Kimi-K2's 1000 billion are 1026.
    assert found["sent_bytes"] / 2e9 == pytest.approx(PUBLISHED_SIZES[LARGE[recipe]].total_b, rel=0.03)


@pytest.mark.full
def test_a_trillion_parameters_on_a_thousand_ranks_are_estimated_in_seconds():
    start = time.monotonic()
    found = estimate(str(RECIPES / "deepseek_v3/kimi_k2_gspo_disaggregated.yaml"), *THOUSAND_RANKS)
    assert time.monotonic() - start < 60
    # Every node needs all that it does not hold itself: of 128 nodes one in eight holds a given expert.
    assert 100 * found["sent_bytes"] < found["link_bytes"]["network"] < 128 * found["sent_bytes"]
    # The eight adapters of each node receive nearly the whole model.
    assert found["seconds"] > 0.9 * found["sent_bytes"] / 8 / 50e9


@pytest.mark.full
@pytest.mark.parametrize(
    ("recipe", "changes", "most_seconds"),
    [
        ("qwen3_moe/qwen3_235b_a22b_gspo_disaggregated.yaml", ["rollout.num_engines=8"], 1.5),
        ("deepseek_v3/deepseek_v3_gspo_disaggregated.yaml", ["rollout.num_engines=8", *ON_TWO_NODES], 2.5),
        ("deepseek_v3/kimi_k2_gspo_disaggregated.yaml", ["rollout.num_engines=16", *ON_TWO_NODES], 3.0),
    ],
)
def test_a_large_model_reaches_its_engines_in_seconds_and_in_at_most_twice_what_the_adapters_need(
    recipe, changes, most_seconds
):
    found = estimate(str(RECIPES / recipe), *changes)
    assert found["trainer_ranks"] == found["engines"] * found["ranks_per_engine"]
    assert found["limit_seconds"] < found["seconds"] < min(most_seconds, 2 * found["limit_seconds"])


def test_with_p2p_all_that_engines_keep_is_sent_by_all_trainer_ranks():
    found = estimate(str(RECIPES / "qwen3_moe/qwen3_30b_a3b_gspo_disaggregated.yaml"))
    sent, kept = found["sent_by_rank"], found["kept_by_rank"]
    # Rows of what ranks keep twice or more enter an engine once. Otherwise each rank keeps an eighth.
    assert found["sent_bytes"] / 8 < kept["mean"] < 1.02 * found["sent_bytes"] / 8
    assert 8 * sent["mean"] == pytest.approx(found["sent_bytes"], rel=1e-6)
    assert sent["least"] > 0.99 * sent["most"]
    assert found["link_bytes"]["network"] == pytest.approx(found["sent_bytes"], rel=1e-6)
    assert found["limit_seconds"] == kept["most"] / 50e9
    assert "buckets" not in found
    recipe = str(RECIPES / "qwen3_moe/qwen3_30b_a3b_gspo_disaggregated.yaml")
    result = CliRunner().invoke(app, ["resync", "estimate", recipe])
    for text in ("sent by each trainer rank", f"{found['rounds']}", "limit: ", "estimated: "):
        assert text in result.stdout
    slow = estimate(recipe, "--network-gb-per-s", "1")
    assert slow["seconds"] > slow["limit_seconds"] == pytest.approx(50 * found["limit_seconds"])


def test_engines_in_block_fp8_get_half_of_the_bytes():
    found = estimate(str(RECIPES / "qwen3_moe/qwen3_30b_a3b_gspo.yaml"), "--block-fp8")
    assert 0.5 < found["sent_bytes"] / found["gathered_bytes"] < 0.53


def test_what_is_printed_is_in_the_json_too():
    recipe = str(RECIPES / "qwen3_moe/qwen3_30b_a3b_gspo.yaml")
    small = ["rollout.num_engines=2", "rollout.engine_tp=4", "rollout.engine_ep=4"]
    found = estimate(recipe, *small, "resync.transport=disk", "--gpus-per-node", "4", "--block-fp8")
    assert found["block_fp8"] is True
    assert found["gpus_per_node"] == 4
    # Colocated engines are on the nodes of the trainer's ranks, whatever the transport.
    assert found["nodes"] == found["trainer_ranks"] / 4
    result = CliRunner().invoke(app, ["resync", "estimate", recipe, "resync.transport=disk", "rollout.num_engines=1"])
    assert f"trainer ranks: {found['trainer_ranks']}, engines: 1 with " in result.stdout
    apart = estimate(recipe, "resync.transport=disk", "rollout.colocated=false")
    assert apart["nodes"] > estimate(recipe, "resync.transport=disk")["nodes"]


def test_speeds_can_be_given():
    recipe = str(RECIPES / "qwen3_moe/qwen3_30b_a3b_gspo.yaml")
    slow = estimate(recipe, "--nvlink-gb-per-s", "1")
    assert slow["machine"]["nvlink_gb_per_s"] == 1
    # Experts lie on the GPU where engines keep them; of the rest some passes the busiest GPU's NVLink.
    assert slow["seconds"] > slow["link_bytes"]["nvlink"] / 8 / 1e9 > 2 * estimate(recipe)["seconds"]
    assert slow["link_bytes"] == estimate(recipe)["link_bytes"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model.path=models/nothing"], "model.path: models/nothing: no such folder, and 'nothing' is none of"),
        (["trainer.parallel.expert=3"], "trainer.parallel.expert: 3 does not divide the model's 128 experts"),
        (
            ["rollout.num_engines=2", "rollout.colocated=false"],
            "rollout.num_engines = 2 with rollout.engine_tp = 8 do not fit on those that have the 8 trainer ranks",
        ),
        (["--gpus-per-node", "4"], "no number of nodes with 4 GPUs is enough: rollout.engine_tp = 8"),
        (["resync.transport=delta"], "command line: resync.transport: delta sends what an update changes"),
        (["resync.bucket_bytes=100"], "command line: resync.bucket_bytes: 100 bytes are too few: one row of model."),
        (
            ["resync.transport=p2p", "rollout.colocated=false", "resync.bucket_bytes=5000"],
            "resync.bucket_bytes: 5000 bytes are too few: one row of model.layers.0.self_attn.o_proj.weight has",
        ),
        (["--network-gb-per-s", "inf"], "network_gb_per_s inf: must be a finite number"),
        (["--gpus-per-node", "0"], "--gpus-per-node 0: must be at least 1"),
        (["--network-gb-per-s", "0"], "network_gb_per_s 0.0: must be above 0"),
    ],
)
def test_what_cannot_be_estimated_is_refused(arguments, message):
    recipe = str(RECIPES / "qwen3_moe/qwen3_30b_a3b_gspo.yaml")
    result = CliRunner().invoke(app, ["resync", "estimate", recipe, *arguments])
    assert result.exit_code == 2
    assert message in result.output
