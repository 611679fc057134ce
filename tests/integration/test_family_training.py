"""Families beyond Qwen3 train: the bias that chooses experts, and checkpoints that go on under another layout."""

import re
from pathlib import Path

import numpy as np
import pytest
from family_updates import updates
from ranks import run_ranks
from safetensors.torch import load_file
from small_models import WITH_EXPERTS, small_model

from slimrl.config.schema.precision import Precision

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

TP2_SP_EP2 = {"tensor": 2, "sequence": True, "expert": 2}


def hf_biases(path: Path) -> dict[str, np.ndarray]:
    """By Megatron's names."""
    return {
        re.sub(r"model\.(.*)\.(mlp|block_sparse_moe)\..*", r"decoder.\1.mlp.router.expert_bias", name): value.numpy()
        for name, value in load_file(path / "model.safetensors").items()
        if name.endswith(("e_score_correction_bias", "expert_bias"))
    }


@pytest.mark.parametrize("family", ["glm4_moe", "minimax_m2"])
def test_an_update_leaves_the_bias_that_chooses_experts_as_it_was(tmp_path, family):
    path = small_model(family, tmp_path / "hf")
    ((losses, biases),) = run_ranks(updates, 1, path, {"precision": Precision.bf16}, range(2))
    expected = hf_biases(path)
    assert np.isfinite(losses).all()
    assert biases.keys() == expected.keys()
    assert all(np.array_equal(biases[name], expected[name]) for name in expected)


@pytest.mark.full
def test_a_rate_moves_the_bias_against_the_load_alike_on_every_rank(tmp_path):
    path = small_model("glm4_moe", tmp_path / "hf")
    settings = {"expert": 2, "megatron": {"moe_router_bias_update_rate": 0.01}}
    ranks = run_ranks(updates, 2, path, settings, range(1))
    expected = hf_biases(path)
    for _, biases in ranks:
        for name, before in expected.items():
            steps = (biases[name] - before) / 0.01
            np.testing.assert_allclose(np.abs(steps), np.abs(np.sign(np.round(steps))), atol=1e-3)
            assert (steps > 0.5).any()
            assert (steps < -0.5).any()
            assert np.array_equal(biases[name], ranks[0][1][name])


DENSE = ["qwen3", "qwen2", "llama", "qwen3_5"]
TP2_SP = {"tensor": 2, "sequence": True}
DENSE_LAYOUTS = [(1, {}), (2, {"pipeline": 2}), (2, {"context": 2})]
OTHER_LAYOUTS = [(1, {}), (2, {"pipeline": 2}), (2, {"expert_tensor": 2}), (4, {"pipeline": 2, "expert": 2})]


@pytest.mark.full
@pytest.mark.parametrize("name", [*WITH_EXPERTS, "glm_moe_dsa_shared", *DENSE])
def test_a_checkpoint_saved_under_one_layout_trains_on_under_another(tmp_path, name):
    path, folder = small_model(name, tmp_path / "hf"), tmp_path / "step_2"
    first, others = (TP2_SP, DENSE_LAYOUTS) if name in DENSE else (TP2_SP_EP2, OTHER_LAYOUTS)
    run_ranks(updates, 2, path, first, range(2), folder)
    whole, _ = run_ranks(updates, 2, path, first, range(4))[0]
    for num_ranks, layout in others:
        if name == "gpt_oss" and "expert_tensor" in layout:
            # megatron-core shards no experts that have biases.
            continue
        resumed, _ = run_ranks(updates, num_ranks, path, layout, range(2, 4), None, folder)[0]
        assert resumed == pytest.approx(whole[2:], abs=1e-5), layout
