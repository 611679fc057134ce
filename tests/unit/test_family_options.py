"""What the families read from config.json, against transformers' own reading, and what they refuse by name."""

import json
import re

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from published_sizes import PUBLISHED_SIZES
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from slimrl.models.families.qwen3_next import unserved
from slimrl.models.family import family_of
from slimrl.models.hf_config import (
    partial_rotary_factor,
    published_config,
    published_names,
    rope_scaling,
    rope_theta,
)


def tensor_count(specs) -> int:
    return sum(torch.Size(spec.shape).numel() for spec in specs)


@pytest.mark.parametrize("name", ["Qwen2.5-0.5B", "Qwen2.5-7B", "Llama-3.1-8B", "Llama-3.2-1B", "GLM-4.5-Air"])
def test_the_parameters_add_up_to_the_published_total(name):
    hf_config = published_config(name)
    billions = tensor_count(family_of(hf_config).hf_tensor_specs(hf_config)) / 1e9
    assert billions == pytest.approx(PUBLISHED_SIZES[name].total_b, rel=0.01)


def test_every_published_config_has_its_size_and_fields_that_transformers_knows():
    for name in published_names():
        hf_config = published_config(name)
        size = PUBLISHED_SIZES[name]
        assert 0 < size.active_b <= size.total_b
        read = AutoConfig.for_model(**hf_config)
        kept = {key: value for key, value in hf_config.items() if not key.startswith("rope_") and key != "dtype"}
        if name.startswith(("Qwen3-Next", "Qwen3.5")):
            del kept["full_attention_interval"]
        assert kept == {key: getattr(read, key) for key in kept}, name
        written = read.to_dict()
        given = hf_config.get("rope_parameters", hf_config)["rope_theta"]
        assert rope_theta(written) == rope_theta(hf_config) == given
        assert rope_scaling(written) == rope_scaling(hf_config)
        default = {"glm4_moe": 0.5, "qwen3_next": 0.25}.get(hf_config["model_type"], 1.0)
        assert partial_rotary_factor(written, default) == partial_rotary_factor(hf_config, default)


@pytest.mark.parametrize("name", ["Llama-3-8B", "Llama-3.1-8B", "Llama-3.2-1B"])
def test_llama_s_wavelengths_are_those_of_transformers(name):
    hf_config = published_config(name)
    model = family_of(hf_config).megatron_config(hf_config)
    rotary = RotaryEmbedding(
        model.transformer["kv_channels"],
        model.rotary_percent,
        rotary_base=model.rotary_base,
        rope_scaling=model.llama3_rope_factor is not None,
        rope_scaling_factor=model.llama3_rope_factor or 1.0,
        use_cpu_initialization=True,
    )
    if model.llama3_rope_factor is None:
        dims = torch.arange(0, 128, 2, dtype=torch.float64)
        expected = 500_000.0 ** (-dims / 128)
    else:
        expected, _ = ROPE_INIT_FUNCTIONS["llama3"](AutoConfig.for_model(**hf_config), "cpu")
    torch.testing.assert_close(rotary.inv_freq.double(), expected.double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("Llama-3.1-8B", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn' is not supported"),
        ("Llama-3.1-8B", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor: None"),
        ("Llama-3.1-8B", {"attention_bias": True}, "attention_bias: True"),
        ("Llama-3.1-8B", {"mlp_bias": True}, "mlp_bias: True"),
        ("Llama-3.1-8B", {"partial_rotary_factor": 0.25}, r"partial_rotary_factor: 0\.25"),
        ("Qwen2.5-7B", {"use_sliding_window": True}, "use_sliding_window: True"),
        ("Qwen2.5-7B", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope type 'yarn' is not supported"),
        ("GLM-4.5", {"norm_topk_prob": False}, "norm_topk_prob: False"),
        ("GLM-4.5", {"scoring_func": "softmax"}, "scoring_func: 'softmax'"),
        ("GLM-4.5", {"num_experts_per_tok": 1}, "num_experts_per_tok: 1"),
        ("GLM-4.5", {"n_group": 8, "topk_group": 2}, "topk_group: 2"),
        ("GLM-4.5", {"n_shared_experts": 0}, "n_shared_experts: 0"),
        ("Qwen3-Next-80B-A3B", {"layer_types": ["sliding_attention"] * 48}, "layer_types: .'sliding_attention'"),
        ("Qwen3-Next-80B-A3B", {"layer_types": ["full_attention"]}, "layer_types: .'full_attention'"),
        ("Qwen3-Next-80B-A3B", {"linear_num_value_heads": 24}, "24 is no multiple of linear_num_key_heads: 16"),
        ("Qwen3-Next-80B-A3B", {"num_nextn_predict_layers": 2}, "2 layers for multi-token prediction"),
        ("Qwen3-Next-80B-A3B", {"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ("Qwen3.5-27B", {"layer_types": ["full_attention"]}, "for qwen3_5_text: layer_types: .'full_attention'"),
        ("Qwen3.5-27B", {"attn_output_gate": False}, "attn_output_gate: False"),
        ("Qwen3.5-27B", {"output_gate_type": "sigmoid"}, "output_gate_type: 'sigmoid'"),
        ("Qwen3.5-27B", {"mtp_num_hidden_layers": 2}, "qwen3_5_text: 2 layers for multi-token prediction"),
        ("Qwen3.5-35B-A3B", {"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings: True"),
        ("Qwen3.5-35B-A3B", {"norm_topk_prob": False}, "norm_topk_prob: False"),
        ("Qwen3.5-35B-A3B", {"mlp_only_layers": [1]}, "qwen3_5_moe_text: mlp_only_layers: .1."),
        ("Qwen3.5-35B-A3B", {"decoder_sparse_step": 2}, "decoder_sparse_step: 2"),
    ],
)
def test_what_no_rule_or_no_layer_of_megatron_covers_is_refused_with_its_value(name, change, message):
    hf_config = {**published_config(name), **change}
    with pytest.raises(ValueError, match=message):
        family_of(hf_config).megatron_config(hf_config)


def test_a_qwen3_next_that_transformers_5_has_saved_is_served_once_it_has_the_keys_of_the_released_ones():
    released = {**published_config("Qwen3-Next-80B-A3B"), "num_hidden_layers": 8}
    assert unserved(released) is None
    saved = AutoConfig.for_model(**released).to_dict()
    message = "SGLang reads neither layer_types nor rope_parameters of a qwen3_next. Set {} in config.json too."
    assert unserved(saved) == message.format("full_attention_interval: 4, rope_theta: 10000000.0")
    added = {"full_attention_interval": 4, "rope_theta": 10000000.0}
    assert unserved({**saved, **added}) is None
    half = AutoConfig.for_model(**{**released, "partial_rotary_factor": 0.5}).to_dict()
    del half["partial_rotary_factor"]
    assert unserved({**half, **added}) == message.format("partial_rotary_factor: 0.5")


@pytest.mark.parametrize("name", ["Qwen3.5-27B", "Qwen3.5-35B-A3B"])
def test_a_qwen3_5_that_transformers_5_has_saved_is_served_once_it_has_the_keys_of_the_released_ones(name):
    released = {**published_config(name), "num_hidden_layers": 8, "output_gate_type": "swish"}
    family, kind = family_of(released), released["model_type"]
    assert family.megatron_config(released).transformer["linear_attention_freq"] == [1, 1, 1, 0] * 2
    assert family.unserved(released) is None
    message = f"SGLang reads neither layer_types nor the partial_rotary_factor of rope_parameters of a {kind}. Set "
    saved = AutoConfig.for_model(**released).to_dict()
    assert family.unserved(saved) == f"{message}full_attention_interval: 4 in config.json too."
    assert family.unserved({**saved, "full_attention_interval": 4}) is None
    half = {**released, "rope_parameters": {**released["rope_parameters"], "partial_rotary_factor": 0.5}}
    assert family.unserved(half) == f"{message}partial_rotary_factor: 0.5 in config.json too."
    assert family.unserved({**half, "partial_rotary_factor": 0.5}) is None
    assert family.megatron_config(half).rotary_percent == 0.5
    flat = {**released, "rope_parameters": None, "rope_theta": 1e7}
    assert family.unserved(flat) == f"SGLang serves no {kind} without rope_parameters. Set them in config.json."


def test_a_minimax_m2_says_what_sglang_would_leave_out():
    released = {**published_config("MiniMax-M2"), "num_hidden_layers": 4}
    family = family_of(released)
    assert family.unserved(released) is None
    needed = {"use_qk_norm": True, "use_routing_bias": True, "scoring_func": "sigmoid", "rotary_dim": 64}
    # What transformers' own keys say.
    own = {name: value for name, value in released.items() if name not in needed} | {"partial_rotary_factor": 0.5}
    saved = AutoConfig.for_model(**own).to_dict()
    assert family.unserved(saved) == (
        "SGLang takes other values than those of this minimax_m2. "
        'Set "use_qk_norm": true, "use_routing_bias": true, "scoring_func": "sigmoid", "rotary_dim": 64 '
        "in config.json too."
    )
    assert family.unserved({**saved, **needed}) is None
    assert family.megatron_config(saved) == family.megatron_config(released)
    refused = {
        "use_qk_norm": False, "use_routing_bias": False, "scoring_func": "softmax", "qk_norm_type": "per_head",
        "shared_intermediate_size": 8, "sliding_window": 4, "attn_type_list": [1, 0, 1, 1],
    }  # fmt: skip
    for name, value in refused.items():
        with pytest.raises(ValueError, match=re.escape(f"not supported for minimax_m2: {name}: {value!r}")):
            family.megatron_config({**released, name: value})


def test_an_olmoe_is_served_with_the_values_that_sglang_has_written_in():
    released = published_config("OLMoE-1B-7B-0924")
    family = family_of(released)
    assert family.unserved(released) is None
    assert family.unserved({**released, "norm_topk_prob": True, "rms_norm_eps": 1e-6}) == (
        'SGLang (srt/models/olmoe.py) has "norm_topk_prob": false, "rms_norm_eps": 1e-05 alone; '
        'config.json has "norm_topk_prob": true, "rms_norm_eps": 1e-06.'
    )
    normalised = family.megatron_config({**released, "norm_topk_prob": True}).transformer
    assert normalised["moe_router_pre_softmax"] is False
    with pytest.raises(ValueError, match=re.escape("not supported for olmoe: clip_qkv: 8.0")):
        family.megatron_config({**released, "clip_qkv": 8.0})


def test_a_hy_v3_says_what_sglang_would_leave_out():
    released = {**published_config("Hy3"), "num_hidden_layers": 4}
    family = family_of(released)
    assert family.unserved(released) is None
    needed = {"qk_norm": True, "route_norm": True, "first_k_dense_replace": 2}
    kinds = ["dense", "dense", "sparse", "sparse"]
    own = {name: value for name, value in released.items() if name not in needed} | {"mlp_layer_types": kinds}
    saved = AutoConfig.for_model(**own).to_dict()
    assert family.unserved(saved) == (
        'SGLang takes other values than those of this hy_v3. Set "qk_norm": true, "route_norm": true, '
        '"first_k_dense_replace": 2 in config.json too.'
    )
    assert family.unserved({**saved, **needed}) is None
    assert family.megatron_config(saved).transformer["moe_layer_freq"] == [0, 0, 1, 1]
    for name in ("qk_norm", "route_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias"):
        with pytest.raises(ValueError, match=f"not supported for hy_v3: {name}: false"):
            family.megatron_config({**released, name: False})


@pytest.mark.parametrize(
    ("name", "own"),
    [("DeepSeek-V3", {}), ("DeepSeek-V3.2", {}), ("GLM-5", {"indexer_rope_interleave": True})],
)
def test_a_deepseek_saved_by_transformers_says_what_sglang_would_miss(name, own):
    released = {**published_config(name), "num_hidden_layers": 4}
    family = family_of(released)
    assert family.unserved(released) is None
    needed = {**own, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    # Not those that transformers keeps without knowing them.
    config = AutoConfig.for_model(**{key: value for key, value in released.items() if key not in needed})
    saved = {**config.to_dict(), "first_k_dense_replace": 3}
    said = family.unserved(saved)
    assert said is not None
    assert all(f'"{key}": {json.dumps(value)}' in said for key, value in needed.items())
    assert "first_k_dense_replace" not in said
    assert family.unserved({**saved, **needed}) is None
    assert family.megatron_config(saved) == family.megatron_config(released)


@pytest.mark.parametrize(("name", "other"), [("DeepSeek-V3.2", True), ("GLM-5", False)])
def test_indexers_that_rotate_otherwise_than_transformers_are_refused(name, other):
    released = published_config(name)
    family = family_of(released)
    with pytest.raises(ValueError, match=f"not supported for {family.name}: indexer_rope_interleave: {other}"):
        family.megatron_config({**released, "indexer_rope_interleave": other})
    rotated = family.megatron_config({**released, "indexer_rope_interleave": None}).transformer
    assert rotated["dsa_indexer_rope_interleaved"] is not other


def test_a_glm4_moe_lite_says_how_many_layers_are_dense_where_sglang_reads_it():
    released = {**published_config("GLM-4.7-Flash"), "num_hidden_layers": 4}
    family = family_of(released)
    assert family.unserved(released) is None
    saved = {**released, "mlp_layer_types": ["dense", "dense", "sparse", "sparse"], "first_k_dense_replace": None}
    message = (
        "SGLang does not read mlp_layer_types of a glm4_moe_lite. Set first_k_dense_replace: 2 in config.json too."
    )
    assert family.unserved(saved) == message
    assert family.megatron_config(saved).transformer["moe_layer_freq"] == [0, 0, 1, 1]
    assert family.unserved({**saved, "first_k_dense_replace": 2}) is None
    for given in (0, 1):
        with pytest.raises(ValueError, match=f"first_k_dense_replace: {given} only {given} dense layers before"):
            family.megatron_config({**saved, "first_k_dense_replace": given})
    with pytest.raises(ValueError, match="no first_k_dense_replace or mlp_layer_types"):
        family.megatron_config({**released, "first_k_dense_replace": None})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mlp_only_layers": [2]}, "SGLang gives every layer of a qwen3_next experts"),
        ({"decoder_sparse_step": 2}, "SGLang gives every layer of a qwen3_next experts"),
        ({"layer_types": ["full_attention", *["linear_attention"] * 7]}, "these layer_types follow none"),
        ({"layer_types": ["linear_attention", "full_attention"] * 4}, "Set full_attention_interval: 2 in"),
        ({"layer_types": ["linear_attention"] * 8}, "Set full_attention_interval: 9 in"),
    ],
)
def test_a_qwen3_next_that_sglang_would_serve_as_another_model_is_told_apart(change, message):
    assert message in unserved({**published_config("Qwen3-Next-80B-A3B"), "num_hidden_layers": 8, **change})


def test_other_frequencies_than_megatron_s_are_refused_with_both():
    hf_config = published_config("Llama-3.1-8B")
    scaling = {**hf_config["rope_scaling"], "high_freq_factor": 8.0, "original_max_position_embeddings": 4096}
    message = (
        r"high_freq_factor: 8\.0, original_max_position_embeddings: 4096 are not supported; "
        r"megatron-core has low_freq_factor: 1\.0, high_freq_factor: 4\.0, original_max_position_embeddings: 8192"
    )
    with pytest.raises(ValueError, match=message):
        family_of(hf_config).megatron_config({**hf_config, "rope_scaling": scaling})


def test_glm_reads_biases_norms_partial_rotation_and_dense_layers_from_the_config():
    glm = family_of({"model_type": "glm4_moe"})
    air, full = (glm.megatron_config(published_config(name)) for name in ("GLM-4.5-Air", "GLM-4.5"))
    assert (air.rotary_percent, full.rotary_percent) == (0.5, 0.5)
    assert (air.transformer["qk_layernorm"], full.transformer["qk_layernorm"]) == (False, True)
    assert air.transformer["add_qkv_bias"]
    assert air.transformer["moe_layer_freq"] == [0] + [1] * 45
    assert full.transformer["moe_layer_freq"] == [0] * 3 + [1] * 89
    assert full.transformer["moe_router_topk_scaling_factor"] == 2.5
    assert full.transformer["moe_shared_expert_intermediate_size"] == 1536
    assert "moe_router_num_groups" not in full.transformer


def test_groups_of_experts_reach_megatron_where_not_all_are_chosen():
    glm = published_config("GLM-4.5")
    for groups, chosen, wanted in ((8, 4, {"moe_router_num_groups": 8, "moe_router_group_topk": 4}), (4, 4, {})):
        config = family_of(glm).megatron_config({**glm, "n_group": groups, "topk_group": chosen})
        grouped = {name: value for name, value in config.transformer.items() if "group" in name and "router" in name}
        assert grouped == wanted
