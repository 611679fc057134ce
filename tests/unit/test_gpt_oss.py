"""What gpt-oss's config says to Megatron, and what is refused by name."""

import re
from pathlib import Path

import pytest
from recipe_problems import recipe_problems
from slimrl_tools.toy.toy_configs import TOYS, ToySize

from slimrl.config.lora_rules import linear_layers
from slimrl.models.family import family_of
from slimrl.models.hf_config import published_config

RECIPE = Path(__file__).parents[2] / "recipes" / "gpt_oss" / "gpt_oss_20b_gspo_disaggregated.yaml"


def test_the_published_configs_make_these_layers():
    config = published_config("gpt-oss-20b")
    model = family_of(config).megatron_config(config).transformer
    assert model["window_size"] == (127, 0)
    assert model["window_attn_skip_freq"] == [1, 0] * 12
    assert (model["activation_func_clamp_value"], model["glu_linear_offset"]) == (7.0, 1.0)
    assert model["yarn_rotary_scaling_factor"] == 32.0
    assert model["yarn_correction_range_round_to_int"] is False
    kinds = ["full_attention", *["sliding_attention"] * 23]
    model = family_of(config).megatron_config({**config, "layer_types": kinds}).transformer
    assert model["window_attn_skip_freq"] == [0, *[1] * 23]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ({"swiglu_alpha": 1.5}, "swiglu_alpha: 1.5"),
        ({"attention_bias": False}, "attention_bias: False"),
        ({"attention_dropout": 0.1}, "attention_dropout: 0.1"),
        (
            {"layer_types": ["full_attention"] * 3},
            "layer_types: ['full_attention', 'full_attention', 'full_attention']",
        ),
        ({"layer_types": ["chunked_attention"] * 4}, "layer_types: ['chunked_attention'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_type: 'linear'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.3}}, "attention_factor: 1.3"),
    ],
)
def test_another_architecture_is_refused(change, said):
    config = TOYS["gpt_oss"](ToySize()) | {"vocab_size": 64} | change
    with pytest.raises(ValueError, match=re.escape("not supported for gpt_oss: ") + ".*" + re.escape(said)):
        family_of(config).megatron_config(config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["trainer.parallel.expert_tensor=2"], "trainer.parallel.expert_tensor: 2: the model's experts have biases"),
        (
            ["rollout.engine_ep=4"],
            "rollout.engine_ep: 4: SGLang loads the experts of this model into engines that have",
        ),
        (
            ["trainer.lora.rank=8", "trainer.lora.targets=[gate_proj]"],
            "trainer.lora.targets: the model has no gate_proj",
        ),
    ],
)
def test_layouts_that_one_of_the_libraries_lacks_are_refused(settings, message):
    problems = recipe_problems(RECIPE, settings, published_config("gpt-oss-20b"))
    assert message in "\n".join(f"{problem.key}: {problem.message}" for problem in problems)
    assert not recipe_problems(RECIPE, [], published_config("gpt-oss-20b"))


def test_context_parallel_ranks_share_the_key_value_heads_that_tensor_parallelism_leaves_them():
    """As `attn_forward_func_with_cp` of Transformer Engine asserts: sinks by a2a, whole heads for each rank."""

    def said(*settings: str, config: dict | None = None) -> list[tuple[str, str]]:
        model = config or published_config("gpt-oss-20b")
        ranks = ["trainer.num_ranks=64", "trainer.parallel.sequence=true"]
        return [(problem.key, problem.message) for problem in recipe_problems(RECIPE, [*ranks, *settings], model)]

    layout = "trainer.parallel.tensor={} trainer.parallel.context={}"
    for sizes in ((2, 4), (4, 2), (8, 1)):
        assert said(*layout.format(*sizes).split()) == []
    (problem,) = said(*layout.format(2, 8).split())
    assert problem == (
        "trainer.parallel.context",
        "tensor 2 x context 8 = 16 does not divide the model's 8 key-value heads, which cp_comm_type a2a shares among "
        "these ranks. Use 4.",
    )
    (problem,) = said("trainer.parallel.context=2", "trainer.megatron.cp_comm_type=p2p")
    assert problem[0] == "trainer.megatron.cp_comm_type"
    assert problem[1] == "p2p: Transformer Engine shares sinks of attention by a2a alone. Leave it out."
    # Other models are asked for a2a; by themselves they pass keys around, of as many heads as there are.
    other = published_config("Qwen3-30B-A3B")
    assert said("trainer.parallel.context=8", config=other) == []
    (problem,) = said("trainer.parallel.context=8", "trainer.megatron.cp_comm_type=a2a", config=other)
    assert problem[0] == "trainer.parallel.context"
    assert "the model's 4 key-value heads, which cp_comm_type a2a shares" in problem[1]


def test_adapters_are_those_of_attention():
    assert linear_layers(published_config("gpt-oss-20b")) == ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.mark.parametrize(
    ("targets", "model", "said"),
    [
        ("all-linear", "gpt-oss-20b", "all-linear leaves out the experts. This model's experts are one tensor in each"),
        ("gate_up_proj", "gpt-oss-20b", "no linear layer that gets adapters. This model's experts are one tensor in"),
        ("gate_up_proj", "Qwen3-30B-A3B", "gets adapters. It is gate_proj and up_proj in one: name these."),
        ("gate_up_prj", "Qwen3-30B-A3B", "gets adapters. Did you mean gate_proj?"),
        ("all-linear", "Qwen3-30B-A3B", None),
        ("q_proj", "gpt-oss-20b", None),
    ],
)
def test_it_is_said_that_experts_in_one_tensor_get_no_adapters(targets, model, said):
    settings = ["trainer.lora.rank=8", f"trainer.lora.targets=[{targets}]", "trainer.parallel.tensor=2"]
    about = [problem for problem in recipe_problems(RECIPE, settings, published_config(model)) if "lora" in problem.key]
    assert len(about) == (said is not None)
    for problem in about:
        assert said in problem.message
        assert problem.warning == (targets == "all-linear")
