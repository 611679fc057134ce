"""Adapters get one rank's gradients under every layout, and the model's own weights stay as they are, bit by bit."""

import numpy as np
import pytest
from lora_cases import LORA, two_updates
from ranks import run_ranks
from small_models import small_model

from slimrl.config.schema.trainer import LoraConfig, OptimizerConfig

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

TP2_SP = {"tensor": 2, "sequence": True}
UNSHARDED = OptimizerConfig(lr=0.5, eps=10.0, clip_grad=0.0, distributed=False)
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
TWO_RANKS = [
    {},
    {**TP2_SP, "expert_tensor": 2},
    {**TP2_SP, "expert": 2},
    {"pipeline": 2, "virtual_pipeline": 2},
    {"expert_tensor": 2, "optimizer": UNSHARDED},
    {"context": 2, "megatron": RECOMPUTED},
]
"""The first is two data-parallel ranks."""
FOUR_RANKS = [
    {**TP2_SP, "pipeline": 2, "expert": 2, "optimizer": UNSHARDED},
    {**TP2_SP, "context": 2, "expert": 4},
    {**TP2_SP, "expert": 2, "expert_tensor": 2},
    {"megatron": {"overlap_grad_reduce": True, "overlap_param_gather": True}},
]
OTHER_MODELS = {
    "qwen3": [{"tensor": 2}, TP2_SP],
    "qwen2_tied": [{"tensor": 2}, {"pipeline": 2}],
    "deepseek_v3": [{**TP2_SP, "expert": 2}, {**TP2_SP, "expert_tensor": 2}, {"pipeline": 2}],
    "moonlight": [{**TP2_SP, "expert": 2}],
    "qwen3_next": [{**TP2_SP, "expert": 2}],
    "qwen3_5": [TP2_SP],
}
SOME_LAYERS = LoraConfig(rank=2, alpha=4.0, targets=["k_proj", "o_proj", "down_proj"])


def assert_updates_of_one_rank(path, num_ranks, layouts, lora=LORA):
    """The adapters after two updates, and losses and gradient norms of both."""
    path, cases = str(path), [{**layout, "lora": lora} for layout in layouts]
    ((expected, adapters, changed),) = run_ranks(two_updates, 1, path, [{"lora": lora}])[0]
    assert changed == []
    by_rank = run_ranks(two_updates, num_ranks, path, cases, timeout_s=200)
    for rank, results in enumerate(by_rank):
        for layout, (updates, own, changed) in zip(layouts, results, strict=True):
            assert changed == [], layout
            for one, many in zip(expected, updates, strict=True):
                assert many.grad_norm == pytest.approx(one.grad_norm, rel=1e-5), layout
                assert many.sums["loss"] == pytest.approx(one.sums["loss"], rel=1e-6), layout
            assert own.keys() == (adapters.keys() if rank == 0 else set())
            for name, value in own.items():
                np.testing.assert_allclose(value, adapters[name], atol=1e-6, err_msg=f"{layout} {name}")


@pytest.mark.full
def test_two_ranks_make_the_updates_of_one(tmp_path):
    assert_updates_of_one_rank(small_model("qwen3_moe", tmp_path / "model"), 2, TWO_RANKS)


@pytest.mark.full
def test_four_ranks_make_the_updates_of_one(tmp_path):
    assert_updates_of_one_rank(small_model("qwen3_moe", tmp_path / "model"), 4, FOUR_RANKS)


@pytest.mark.full
@pytest.mark.parametrize("model", OTHER_MODELS)
def test_two_ranks_make_the_updates_of_one_on_other_families(tmp_path, model):
    assert_updates_of_one_rank(small_model(model, tmp_path / "model"), 2, OTHER_MODELS[model])


@pytest.mark.full
def test_some_of_the_layers_in_a_fused_one_have_adapters(tmp_path):
    assert_updates_of_one_rank(small_model("qwen3_moe", tmp_path / "model"), 2, [{**TP2_SP, "expert": 2}], SOME_LAYERS)
