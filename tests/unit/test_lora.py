"""Adapters as a recipe asks for them, by name, shape and shard, in PEFT's configuration, and in a plan."""

from dataclasses import replace
from math import prod

import pytest
from slimrl_tools.toy.toy_configs import ToySize, toy_config

from slimrl.config.hf_config import num_experts
from slimrl.config.lora_rules import (
    LINEAR_LAYERS,
    NOT_WITH_ADAPTERS,
    adapter_targets,
    linear_layers,
    lora_model_violations,
    lora_violations,
)
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.trainer import LoraConfig, ParallelConfig
from slimrl.estimates.planner.parameters import ParameterTable, stage_total
from slimrl.models.adapters import adapter_map, layer_name
from slimrl.models.architecture import trained_architecture
from slimrl.models.family import family_of
from slimrl.models.hf_config import published_config, published_names
from slimrl.models.peft_config import peft_config

LORA = LoraConfig(rank=8)
FAMILIES = ("qwen3_moe", "glm4_moe", "deepseek_v3", "minimax_m2", "olmoe", "qwen3_next", "qwen3_5", "qwen3_5_moe")


def recipe(**lora) -> Recipe:
    plain = Recipe()
    return replace(plain, trainer=replace(plain.trainer, lora=LoraConfig(**{"rank": 4, **lora})))


def adapters_of(config):
    return adapter_map(family_of(config).weight_map(config), adapter_targets(LORA, config), LORA.rank)


@pytest.mark.parametrize("name", published_names())
def test_the_rules_know_the_linear_layers_of_every_published_model(name):
    config = published_config(name)
    held = {
        layer_name(tensor)
        for rule in family_of(config).weight_map(config).rules
        for tensor in rule.hf
        if rule.quantizable
        # PEFT knows no layers within a tensor of all experts.
        and tensor.stacked is None
        and tensor.name.endswith(".weight")
        and not any(part in tensor.name for part in ("linear_attn", ".indexer."))
    }
    # Sparse attention reads its weight instead of calling it.
    assert set(linear_layers(config)) == held - ({"kv_b_proj"} if "index_topk" in config else set())
    assert held <= set(LINEAR_LAYERS)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_linear_layer_gets_two_matrices_sharded_as_its_weight(family):
    config = toy_config(family, ToySize()) | {"vocab_size": 300}
    weight_map = family_of(config).weight_map(config)
    adapters = {tensor.name: (entry, tensor) for entry in adapters_of(config).entries for tensor in entry.hf}
    seen = 0
    for entry in weight_map.entries:
        for tensor in entry.hf:
            layer = "base_model.model." + tensor.name.removesuffix(".weight")
            if not entry.rule.quantizable or "linear_attn" in tensor.name:
                assert f"{layer}.lora_A.weight" not in adapters
                continue
            seen += 2
            (a, a_tensor), (b, b_tensor) = (adapters[f"{layer}.lora_{letter}.weight"] for letter in "AB")
            assert (a_tensor.shape, b_tensor.shape) == ((8, tensor.shape[1]), (tensor.shape[0], 8))
            dim = None if entry.rule.shard is None else entry.rule.shard.dim
            assert (a.rule.shard is not None, b.rule.shard is not None) == (dim == 1, dim == 0)
            name = layer_name(tensor)
            assert a.megatron[0] == entry.megatron[0].removesuffix("weight") + f"adapters.{name}_A"
    assert seen == len(adapters) > 0


@pytest.mark.parametrize(
    ("lora", "key", "message"),
    [
        ({"targets": ["q_porj"]}, "trainer.lora.targets", "Did you mean q_proj?"),
        ({"targets": ["embed_tokens"]}, "trainer.lora.targets", "is no linear layer that gets adapters"),
        ({"targets": []}, "trainer.lora.targets", "names no layer"),
        ({"targets": ["all-linear", "q_proj"]}, "trainer.lora.targets", "Leave the others out"),
    ],
)
def test_wrong_targets_are_refused(lora, key, message):
    ((found, said),) = lora_violations(recipe(**lora))
    assert found == key
    assert message in said
    assert list(lora_violations(recipe(**lora, rank=0))) == []


@pytest.mark.parametrize("name", NOT_WITH_ADAPTERS)
def test_layers_that_take_no_adapters_are_refused(name):
    plain = recipe()
    asked = replace(plain, trainer=replace(plain.trainer, megatron={name: True}))
    assert [key for key, _ in lora_violations(asked)] == [f"trainer.megatron.{name}"]


def test_targets_are_those_of_the_model():
    latent, grouped = (toy_config(name, ToySize()) for name in ("deepseek_v3", "qwen3_moe"))
    (said,) = lora_model_violations(recipe(targets=["k_proj", "o_proj"]), latent)
    assert said[1].startswith("the model has no k_proj. It has q_a_proj, q_b_proj, kv_a_proj_with_mqa")
    assert list(lora_model_violations(recipe(targets=["k_proj", "o_proj"]), grouped)) == []
    sparse = toy_config("deepseek_v32", ToySize())
    (said,) = lora_model_violations(recipe(targets=["kv_b_proj", "o_proj"]), sparse)
    assert said[1].startswith("sparse attention reads the weight of kv_b_proj without calling the layer. Use q_a_proj")
    assert "kv_b_proj" not in said[1].partition("Use")[2]
    assert adapter_targets(LORA, sparse) == tuple(n for n in adapter_targets(LORA, latent) if n != "kv_b_proj")
    assert list(lora_model_violations(recipe(targets=["kv_b_proj", "o_proj"]), latent)) == []
    (said,) = lora_model_violations(recipe(targets=["up_proj"]), grouped)
    assert said[1].endswith("Add gate_proj.")
    dense = {name: value for name, value in grouped.items() if name != "num_experts"}
    assert num_experts(dense) == 0
    assert list(lora_model_violations(recipe(targets=["up_proj"]), dense)) == []


def test_a_checkpoint_says_which_adapters_it_has():
    config = toy_config("qwen3_moe", ToySize()) | {"vocab_size": 300}
    plain = trained_architecture(config, LoraConfig())
    few, all_of_them = (
        trained_architecture(config, LoraConfig(rank=8, targets=targets))
        for targets in (["o_proj", "q_proj"], ["all-linear"])
    )
    assert few == plain | {"lora_rank": 8, "lora_alpha": 32.0, "lora_targets": ["q_proj", "o_proj"]}
    assert all_of_them["lora_targets"] == list(linear_layers(config))


def test_peft_is_told_of_layers_beside_experts_as_parameters():
    moe, mixed = (toy_config(name, ToySize()) | {"vocab_size": 300} for name in ("qwen3_moe", "deepseek_v3"))
    plain = peft_config(LORA, adapters_of(moe).hf_tensors, moe, "base")
    assert (plain["target_modules"], plain["target_parameters"]) == (list(linear_layers(moe)), None)
    assert (plain["r"], plain["lora_alpha"], plain["base_model_name_or_path"]) == (8, 32.0, "base")
    parameters = peft_config(LORA, adapters_of(mixed).hf_tensors, mixed, "base")["target_parameters"]
    assert parameters == [
        f"{parent}.{name}.weight"
        for parent in ("mlp", "shared_experts")
        for name in ("gate_proj", "up_proj", "down_proj")
    ]


def test_a_rank_of_a_plan_holds_its_part_of_the_adapters():
    config = published_config("Qwen3-30B-A3B")
    adapters = adapters_of(config)
    layers = [list(range(24)), list(range(24, 48))]
    hidden, wide, rank = config["hidden_size"], config["moe_intermediate_size"], 8
    heads, groups, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    (stage,), (other,) = ParameterTable(adapters).stages(
        ParallelConfig(tensor=2, expert=4, pipeline=2), layers
    )  # fmt: skip
    assert stage == other
    rows = (heads + 2 * groups) * dim
    # A of q, k, v and B of o are whole on each tensor-parallel rank, and an expert's on its expert-parallel rank.
    assert sum(stage.dense) == 24 * rank * (3 * hidden + rows // 2 + heads * dim // 2 + hidden)
    assert sum(stage.experts) == 24 * (128 // 4) * 3 * rank * (hidden + wide)
    whole = ParameterTable(adapters).stages(ParallelConfig(), [list(range(48))])
    assert sum(map(stage_total, whole)) == sum(prod(tensor.shape) for tensor in adapters.hf_tensors.values())
