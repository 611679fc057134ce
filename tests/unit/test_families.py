"""Weight maps against transformers: every parameter of the full-size models, by name and shape, exactly once."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from slimrl.checkpoints.hf_check import check_tensors
from slimrl.models.family import FAMILIES, family_of
from slimrl.models.hf_config import published_config, published_names, read_hf_config
from slimrl.models.tensor_names import MAX_LISTED

TINY_MOE = {
    "model_type": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 48,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [3],
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


ON_DISK = {
    "hy_v3": [
        ("mlp.gate.weight", "mlp.router.gate.weight"),
        ("mlp.e_score_correction_bias", "mlp.expert_bias"),
        (".shared_experts.", ".shared_mlp."),
    ],
    "minimax_m2": [(".mlp.", ".block_sparse_moe."), ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")],
}
"""model_type -> (part of a name in memory, on disk), as transformers' conversion_mapping.py has them."""


def transformers_tensors(hf_config: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes on disk: transformers holds experts stacked and writes them one by one."""
    tensors = _separate_experts(hf_config)
    for part, other in ON_DISK.get(hf_config["model_type"], ()):
        tensors = {name.replace(part, other): shape for name, shape in tensors.items()}
    return tensors


def _separate_experts(hf_config: dict) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf_config))
    saved = model.state_dict().keys()
    tensors = [*model.named_parameters(), *((name, buffer) for name, buffer in model.named_buffers() if name in saved)]
    result: dict[str, tuple[int, ...]] = {}
    for name, parameter in tensors:
        stacked = re.fullmatch(r"(.*\.experts)\.(gate_up_proj|down_proj)(_bias)?", name)
        if not stacked:
            result[name] = tuple(parameter.shape)
            continue
        prefix, kind, bias = stacked.groups()
        if hf_config["model_type"] == "gpt_oss":
            for expert, stack in enumerate(parameter):
                own = f"{prefix}.{expert}.{kind}.{'bias' if bias else 'weight'}"
                result[own] = tuple(reversed(stack.shape))
            continue
        for expert in range(parameter.shape[0]):
            rows, columns = parameter.shape[1:]
            if kind == "down_proj":
                result[f"{prefix}.{expert}.down_proj.weight"] = (rows, columns)
            else:
                for half in ("gate_proj", "up_proj"):
                    result[f"{prefix}.{expert}.{half}.weight"] = (rows // 2, columns)
    return result


@pytest.mark.parametrize("name", published_names())
def test_every_parameter_of_the_published_model_is_covered_exactly_once(name):
    hf_config = published_config(name)
    specs = family_of(hf_config).hf_tensor_specs(hf_config)
    assert len({spec.name for spec in specs}) == len(specs)
    assert {spec.name: spec.shape for spec in specs} == transformers_tensors(hf_config)
    wide = {spec.name for spec in specs if spec.dtype == "float32"}
    assert wide == {each for each in transformers_tensors(hf_config) if is_float32(each, name)}
    assert {spec.dtype for spec in specs if spec.name not in wide} == {"bfloat16"}


def is_float32(tensor: str, model: str) -> bool:
    of_delta_nets = (".linear_attn.A_log", ".linear_attn.norm.weight") if model.startswith("Qwen3.5") else ()
    return tensor.endswith(("e_score_correction_bias", "expert_bias", "block_sparse_moe.gate.weight", *of_delta_nets))


MTP_TENSORS = {
    "embed_tokens": ("vocab_size", "hidden_size"),
    "enorm": ("hidden_size",),
    "hnorm": ("hidden_size",),
    "eh_proj": ("hidden_size", "2 * hidden_size"),
    "shared_head.norm": ("hidden_size",),
    "shared_head.head": ("vocab_size", "hidden_size"),
}
"""What published checkpoints have in a layer for multi-token prediction besides a layer of the model's kind."""


@pytest.mark.parametrize("name", ["DeepSeek-V3", "GLM-4.5-Air", "GLM-4.5"])
def test_layers_for_multi_token_prediction_are_a_layer_more_and_their_own_tensors(name):
    hf_config = {**published_config(name), "n_routed_experts": 16}
    family, trunk = family_of(hf_config), hf_config["num_hidden_layers"]
    longer = {**hf_config, "num_hidden_layers": trunk + 1, "num_nextn_predict_layers": 0}
    sizes = {**hf_config, "2 * hidden_size": 2 * hf_config["hidden_size"]}
    expected = {spec.name: spec.shape for spec in family.hf_tensor_specs(longer)} | {
        f"model.layers.{trunk}.{tensor}.weight": tuple(sizes[size] for size in shape)
        for tensor, shape in MTP_TENSORS.items()
    }
    specs = family.hf_tensor_specs(hf_config, mtp=True)
    assert len({spec.name for spec in specs}) == len(specs)
    assert {spec.name: spec.shape for spec in specs} == expected
    without = {spec.name for spec in family.hf_tensor_specs(hf_config)}
    assert {name for name in expected if not name.startswith(f"model.layers.{trunk}.")} == without


def test_with_tied_embeddings_the_mtp_layers_repeat_one_tensor_twice():
    hf_config = {**published_config("DeepSeek-V3"), "num_hidden_layers": 4, "n_routed_experts": 8}
    tied = {**hf_config, "tie_word_embeddings": True}
    expected = {spec.name for spec in family_of(hf_config).hf_tensor_specs(hf_config, mtp=True)} - {"lm_head.weight"}
    assert {spec.name for spec in family_of(tied).hf_tensor_specs(tied, mtp=True)} == expected


@pytest.mark.parametrize("name", ["Qwen3-Next-80B-A3B", "Qwen3.5-27B", "Qwen3.5-35B-A3B"])
def test_qwen3_next_and_3_5_have_a_layer_for_multi_token_prediction_like_one_with_attention(name):
    """As published, without its own embedding and output layer; the config of Qwen3-Next does not name it."""
    hf_config = published_config(name)
    hf_config |= {"num_experts": 16} if "num_experts" in hf_config else {}
    family, hidden = family_of(hf_config), hf_config["hidden_size"]
    own = {"fc": (hidden, 2 * hidden)}
    own |= dict.fromkeys(("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"), (hidden,))
    expected = {f"mtp.{name}.weight": shape for name, shape in own.items()}
    # Layer 3 is the first with attention.
    for spec in family.hf_tensor_specs(hf_config):
        if spec.name.startswith("model.layers.3."):
            expected[spec.name.replace("model.layers.3.", "mtp.layers.0.")] = spec.shape
    found = {spec.name: spec.shape for spec in family.hf_tensor_specs(hf_config, mtp=True)}
    assert {name: shape for name, shape in found.items() if name.startswith("mtp.")} == expected
    assert family.megatron_config(hf_config).mtp_layers == 1


@pytest.mark.parametrize("name", ["Qwen3-Next-80B-A3B", "Qwen3.5-35B-A3B"])
def test_qwen3_next_s_and_3_5_s_layers_are_those_that_transformers_makes(name):
    few = {**published_config(name), "num_hidden_layers": 6, "num_experts": 4}
    for change in ({}, {"full_attention_interval": 3}, {"layer_types": ["full_attention", *["linear_attention"] * 5]}):
        config = {**few, **change}
        kinds = AutoConfig.for_model(**config).layer_types
        model = family_of(config).megatron_config(config).transformer
        assert model["linear_attention_freq"] == [int(kind == "linear_attention") for kind in kinds]
        names = {spec.name for spec in family_of(config).hf_tensor_specs(config)}
        assert names == transformers_tensors(config).keys()


def test_a_rank_has_the_convolution_of_its_own_queries_keys_and_values():
    """16 heads of 128 channels of queries, as many of keys, and 32 of values."""
    hf_config = {**published_config("Qwen3-Next-80B-A3B"), "num_hidden_layers": 1, "num_experts": 4}
    weight_map = family_of(hf_config).weight_map(hf_config)
    entry = weight_map.entries[weight_map.index_of("decoder.layers.0.self_attention.conv1d.weight")]
    channels = torch.arange(2 * 16 * 128 + 32 * 128).view(-1, 1, 1).expand(-1, 1, 4)
    shard = entry.to_megatron(lambda name, where: channels[where], 3, 8)[:, 0, 0]
    own = [range(768, 1024), range(2048 + 768, 2048 + 1024), range(4096 + 1536, 4096 + 2048)]
    assert shard.tolist() == [channel for part in own for channel in part]


def test_layers_without_experts_take_the_dense_rules():
    specs = family_of(TINY_MOE).hf_tensor_specs(TINY_MOE)
    assert {spec.name: spec.shape for spec in specs} == transformers_tensors(TINY_MOE)
    config = family_of(TINY_MOE).megatron_config(TINY_MOE)
    assert config.transformer["moe_layer_freq"] == [0, 1, 0, 0]


def test_export_runs_layer_by_layer_and_expert_by_expert():
    names = [spec.name for spec in family_of(TINY_MOE).hf_tensor_specs(TINY_MOE)]
    layers = [int(match[1]) for name in names if (match := re.search(r"layers\.(\d+)\.", name))]
    experts = [int(match[1]) for name in names if (match := re.search(r"experts\.(\d+)\.", name))]
    assert layers == sorted(layers)
    assert experts == sorted(experts)
    assert names[0] == "model.embed_tokens.weight"
    assert names[-1] == "lm_head.weight"


def test_both_spellings_of_megatron_s_layers_lead_to_one_entry():
    weight_map = family_of(TINY_MOE).weight_map(TINY_MOE)
    pairs = {
        "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight": (
            "decoder.layers.1.mlp.experts.linear_fc1.weight3"
        ),
        "decoder.layers.0.input_layernorm.weight": "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.0.pre_mlp_layernorm.weight": "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
    }
    for local, engine in pairs.items():
        assert weight_map.index_of(local) is not None
        assert weight_map.index_of(local) == weight_map.index_of(engine)
    assert weight_map.index_of("decoder.layers.0.mlp.experts.linear_fc1.weight0") is None


def test_only_routed_experts_are_cut_over_the_ranks_of_the_experts_tensor_group():
    for name in ("Qwen3-30B-A3B", "DeepSeek-V3", "GLM-4.5-Air"):
        hf_config = {**published_config(name), "num_hidden_layers": 4}
        groups = {
            tensor.name: entry.rule.shard.group
            for entry in family_of(hf_config).weight_map(hf_config).entries
            if entry.rule.shard is not None
            for tensor in entry.hf
        }
        routed = {name for name in groups if ".mlp.experts." in name}
        assert {name for name, group in groups.items() if group == "expert_tensor"} == routed
        assert {groups[name] for name in groups.keys() - routed} == {"tensor"}
        assert routed


def test_a_tied_head_is_the_embedding_on_the_last_stage():
    tied = {**TINY_MOE, "tie_word_embeddings": True}
    weight_map = family_of(tied).weight_map(tied)
    assert weight_map.index_of("output_layer.weight") == weight_map.index_of("embedding.word_embeddings.weight") == 0
    assert "lm_head.weight" not in weight_map.hf_tensors


def test_an_unknown_family_names_the_known_ones():
    with pytest.raises(ValueError, match=r"model_type 'gpt2' is not supported; known: .*qwen3, .*qwen3_moe, "):
        family_of({"model_type": "gpt2"})


def test_a_model_type_belongs_to_one_family():
    types = [model_type for family in FAMILIES for model_type in family.model_types]
    assert len(types) == len(set(types))


def test_configs_of_transformers_4_and_5_mean_the_same():
    new = {**TINY_MOE, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "num_local_experts": 4}
    del new["rope_theta"], new["num_experts"]
    family = family_of(TINY_MOE)
    assert family.megatron_config(new) == family.megatron_config(TINY_MOE)
    assert family.hf_tensor_specs(new) == family.hf_tensor_specs(TINY_MOE)


@pytest.mark.parametrize(
    "change",
    [{"rope_scaling": {"type": "yarn", "factor": 4}}, {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}],
)
def test_scaled_positions_are_refused_by_families_without_them(change):
    with pytest.raises(ValueError, match="'yarn' is not supported for qwen3_moe"):
        family_of(TINY_MOE).megatron_config({**TINY_MOE, **change})


@pytest.mark.parametrize("change", [{"hidden_act": "gelu"}, {"attention_bias": True}, {"use_sliding_window": True}])
def test_options_that_no_rule_covers_are_refused_by_name(change):
    (name,) = change
    with pytest.raises(ValueError, match=name):
        family_of(TINY_MOE).megatron_config({**TINY_MOE, **change})


def test_a_config_that_is_missing_or_broken_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json: no such file"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text('{"a": 1,\n}')
    with pytest.raises(ValueError, match=r"config\.json:2: not JSON"):
        read_hf_config(tmp_path)


def test_a_checkpoint_of_other_tensors_than_its_config_implies_is_told_all_of_them():
    family = family_of(TINY_MOE)
    good = {spec.name: spec for spec in family.hf_tensor_specs(TINY_MOE)}
    names = list(good)

    def problems(specs):
        with pytest.raises(ValueError, match=r"does not match its config\.json, which is of a qwen3_moe: ") as raised:
            check_tensors(SimpleNamespace(path="here", specs=specs), family, TINY_MOE)
        counts, *listed = str(raised.value).partition("qwen3_moe: ")[2].splitlines()
        return counts, [line.strip() for line in listed]

    assert check_tensors(SimpleNamespace(path="here", specs=good), family, TINY_MOE) is False
    norm = good["model.norm.weight"]
    changed = {name: spec for name, spec in good.items() if name != "lm_head.weight"} | {
        "odd": norm,
        norm.name: replace(norm, shape=(15,)),
        names[1]: replace(good[names[1]], dtype="float64"),
    }
    assert problems(changed) == (
        "1 tensors missing, 1 unknown, 2 of another shape or type",
        [
            "lm_head.weight: missing",
            "odd: not part of this model",
            "model.norm.weight: shape [15], config.json implies [16]",
            f"{names[1]}: float64 is not supported, convert it to bfloat16 or float32 first",
        ],
    )
    for missing, more in ((MAX_LISTED, []), (MAX_LISTED + 3, ["and 3 more missing"])):
        assert problems({name: good[name] for name in names[missing:]})[1] == [
            *(f"{name}: missing" for name in names[:MAX_LISTED]), *more,
        ]  # fmt: skip
