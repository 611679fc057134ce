"""Multi-latent attention and its positions, against transformers' own formulas; DeepSeek's forms that are refused."""

import math

import pytest
import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    YarnRotaryEmbedding,
    _yarn_get_mscale,
)
from shard_shapes import shard_shape
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

from slimrl.models.family import family_of
from slimrl.models.hf_config import published_config

YARN_OF_FACTOR_ALONE = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


def transformer(hf_config) -> dict:
    return family_of(hf_config).megatron_config(hf_config).transformer


def softmax_scale(config: dict) -> float:
    """As Megatron's MultiLatentAttention computes it."""
    mscale = _yarn_get_mscale(config["rotary_scaling_factor"], config.get("mscale_all_dim", 0.0))
    return mscale**2 / math.sqrt(config["qk_head_dim"] + config["qk_pos_emb_head_dim"])


def changed_deepseek(**changes) -> dict:
    return {**published_config("DeepSeek-V3"), **changes}


@pytest.mark.parametrize(
    "hf_config",
    [
        published_config("DeepSeek-V3"),
        published_config("Kimi-K2"),
        changed_deepseek(rope_scaling=YARN_OF_FACTOR_ALONE),
        changed_deepseek(rope_scaling={**YARN_OF_FACTOR_ALONE, "mscale": 0.7, "mscale_all_dim": 0.5}),
    ],
    ids=["DeepSeek-V3", "Kimi-K2", "factor alone", "two mscales"],
)
def test_yarn_has_the_frequencies_and_the_factors_of_transformers(hf_config, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    config = transformer(hf_config)
    assert config["rope_type"] == "yarn"
    read = AutoConfig.for_model(**hf_config)
    expected_D, expected_factor = ROPE_INIT_FUNCTIONS["yarn"](read, "cpu")
    size = config["qk_pos_emb_head_dim"]
    rotary = YarnRotaryEmbedding(
        size,
        rotary_base=config["rotary_base"],
        scaling_factor=config["rotary_scaling_factor"],
        original_max_position_embeddings=config["original_max_position_embeddings"],
        beta_fast=config["beta_fast"],
        beta_slow=config["beta_slow"],
        mscale=config["mscale"],
        mscale_all_dim=config["mscale_all_dim"],
        use_cpu_initialization=True,
    )
    angles_T11D, factor = rotary.get_emb(2)
    torch.testing.assert_close(angles_T11D[1, 0, 0], torch.cat([expected_D, expected_D]), rtol=1e-6, atol=0)
    assert factor == pytest.approx(expected_factor, rel=1e-12)
    head = config["qk_head_dim"] + size
    assert softmax_scale(config) == pytest.approx(yarn_apply_mscale(read.rope_parameters, head**-0.5), rel=1e-12)


def test_unscaled_positions_leave_the_softmax_unscaled():
    config = transformer(published_config("Moonlight-16B-A3B"))
    assert config["rope_type"] == "rope"
    assert config["rotary_base"] == 50_000.0
    assert softmax_scale(config) == pytest.approx(192**-0.5, rel=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_interleave": False}, "rope_interleave: False"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear' is not supported for deepseek_v3"),
        ({"rope_scaling": {**YARN_OF_FACTOR_ALONE, "attention_factor": 1.5}}, "attention_factor"),
        ({"rope_scaling": {**YARN_OF_FACTOR_ALONE, "truncate": False}}, "truncate"),
        ({"rope_scaling": {**YARN_OF_FACTOR_ALONE, "mscale": 0.7}}, "one of mscale and mscale_all_dim"),
        ({"rope_scaling": {**YARN_OF_FACTOR_ALONE, "mscale_all_dim": 1.0}}, "one of mscale and mscale_all_dim"),
        ({"attention_bias": True}, "attention_bias: True"),
        ({"topk_method": "group_limited_greedy"}, "topk_method: 'group_limited_greedy'"),
        ({"num_experts_per_tok": 6}, "topk_group: 4"),
    ],
)
def test_what_megatron_s_attention_or_router_lacks_is_refused_with_its_value(change, message):
    with pytest.raises(ValueError, match=message):
        transformer(changed_deepseek(**change))


def test_down_projections_are_whole_on_every_rank_and_up_projections_cut_by_heads():
    hf_config = changed_deepseek(num_hidden_layers=1, n_routed_experts=8)
    weight_map = family_of(hf_config).weight_map(hf_config)
    shapes = {}
    for name in ("linear_q_down_proj", "linear_kv_down_proj", "linear_q_up_proj", "linear_kv_up_proj", "linear_proj"):
        index = weight_map.index_of(f"decoder.layers.0.self_attention.{name}.weight")
        assert index is not None
        entry = weight_map.entries[index]
        shapes[name] = shard_shape(entry, 4 if entry.rule.shard else 1)
    assert shapes == {
        "linear_q_down_proj": (1536, 7168),
        "linear_kv_down_proj": (512 + 64, 7168),
        "linear_q_up_proj": (128 // 4 * (128 + 64), 1536),
        "linear_kv_up_proj": (128 // 4 * (128 + 128), 512),
        "linear_proj": (7168, 128 // 4 * 128),
    }


def test_kimi_k2_is_deepseek_under_its_own_model_type():
    hf_config = published_config("Kimi-K2")
    kimi = {**hf_config, "model_type": "kimi_k2"}
    assert family_of(kimi) is family_of(hf_config)
    assert transformer(kimi) == transformer(hf_config)
