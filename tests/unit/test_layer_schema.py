"""The schema without Megatron against the one that Megatron's own modules give, for every family."""

import pytest
from slimrl_tools.toy.toy_configs import TOYS, ToySize

from slimrl.checkpoints.torch_dist.layer_schema import layer_schema
from slimrl.models.family import FAMILIES
from slimrl.models.hf_config import published_config
from slimrl.trainer.checkpointing.shard_schema import shard_schema

VOCABULARY = 515
"""Odd, so that tensor parallelism pads it."""
LAYOUTS = [{}, {"tensor": 2}, {"tensor": 2, "expert_tensor": 2}]


def config_of(family: str, **more) -> dict:
    return TOYS[family](ToySize(mtp_layers=1)) | {"vocab_size": VOCABULARY, **more}


def assert_as_megatron_has_it(config: dict, **layout) -> None:
    schema, expected = layer_schema(config, **layout), shard_schema(config, **layout)
    assert schema.weight_map.entries == expected.weight_map.entries
    assert schema.chunks == expected.chunks
    assert schema.objects == expected.objects


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("family", [family.name for family in FAMILIES])
def test_keys_places_and_objects_are_megatrons(family, layout):
    if family == "gpt_oss" and "expert_tensor" in layout:
        for schema in (layer_schema, shard_schema):
            with pytest.raises(ValueError, match=r"[Bb]ias"):
                schema(config_of(family), **layout)
        return
    assert_as_megatron_has_it(config_of(family), **layout, mtp=True)


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("qwen3_next", {}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("llama", {"tie_word_embeddings": False}),
        ("qwen3_moe", {"mlp_only_layers": [1]}),
        ("deepseek_v3", {"q_lora_rank": None}),
    ],
    ids=str,
)
def test_so_are_those_of_other_configs(family, more):
    assert_as_megatron_has_it(config_of(family, **more), tensor=2, mtp=False)


def test_so_are_those_of_a_published_model():
    assert_as_megatron_has_it(published_config("Qwen3-30B-A3B") | {"num_hidden_layers": 2}, tensor=4, expert_tensor=2)


def test_sizes_that_do_not_divide_a_tensor_are_refused():
    with pytest.raises(ValueError, match="does not divide over 5 ranks"):
        layer_schema(config_of("qwen3"), tensor=5)
