"""`slimrl-tools diff-config`: what a config.json decides, and which settings of a recipe make another model of it."""

import json

import pytest
from slimrl_tools.cli import app
from slimrl_tools.inspect.config_diff import diff_config
from slimrl_tools.toy.toy_configs import TOYS, ToySize, toy_config
from typer.testing import CliRunner

from slimrl.config.megatron_verdicts import MEGATRON_VERDICTS
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.trainer import OptimizerConfig, ParallelConfig, TrainerConfig
from slimrl.models.family import FAMILIES
from slimrl.models.hf_config import published_config, published_names

RECIPE = "recipes/tiny_moe/sft.yaml"
MODEL_TYPES = {model_type for family in FAMILIES for model_type in family.model_types}


def trainer(**megatron):
    return TrainerConfig(
        parallel=ParallelConfig(),
        precision=Precision.bf16,
        max_tokens_per_rank=64,
        optimizer=OptimizerConfig(lr=1e-3),
        megatron=megatron,
    )


def toy_hf_config(family, **changes):
    return toy_config(family, ToySize()) | {"vocab_size": 100} | changes


def row_of(result, name):
    (row,) = [row for row in result.rows if row.field == name]
    return row


@pytest.mark.parametrize("name", [n for n in published_names() if published_config(n)["model_type"] in MODEL_TYPES])
def test_published_configs_are_built_as_they_say_and_read_whole(name):
    result = diff_config(published_config(name), trainer())
    assert result.agrees
    assert result.unread == {}
    assert all(row.built == row.family for row in result.rows)


def test_the_interval_of_attention_is_harmless_beside_a_list_of_layers_that_follows_it():
    config = {**published_config("Qwen3.5-27B"), "num_hidden_layers": 4}
    for kinds, unread in (
        (["linear_attention"] * 3 + ["full_attention"], {}),
        (["linear_attention", "full_attention"] * 2, {"full_attention_interval": 4}),
        (["linear_attention"] * 4, {"full_attention_interval": 4}),
    ):
        assert diff_config({**config, "layer_types": kinds}, trainer()).unread == unread


def test_each_fact_names_the_keys_that_decide_it():
    result = diff_config(toy_hf_config("qwen3_moe"), trainer())
    assert row_of(result, "layernorm_epsilon").keys == {"rms_norm_eps": 1e-6}
    assert row_of(result, "moe_router_topk").keys == {"num_experts_per_tok": 2}
    assert row_of(result, "rotary_base").keys == {"rope_theta": 1000.0}
    assert row_of(result, "moe_router_pre_softmax").keys == {"norm_topk_prob": True}
    assert set(row_of(result, "moe_layer_freq").keys) == {
        "num_hidden_layers", "decoder_sparse_step", "mlp_only_layers",
    }  # fmt: skip
    assert row_of(result, "normalization").keys == {}
    assert result.fixed == {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}


@pytest.mark.parametrize(
    ("family", "setting", "value"),
    [
        ("qwen3_moe", "layernorm_epsilon", 1e-5),
        ("qwen3_moe", "moe_router_topk", 4),
        ("qwen3", "activation_func", "gelu"),
        ("deepseek_v3", "qk_layernorm", False),
        ("qwen3", "softmax_scale", 0.5),
        ("qwen3", "window_size", [8, 0]),
    ],
)
def test_a_setting_that_changes_the_model_is_found(family, setting, value):
    result = diff_config(toy_hf_config(family), trainer(**{setting: value}))
    row = row_of(result, setting)
    assert not result.agrees
    assert not row.agrees
    assert row.built == value
    assert "changes the model" in row.note
    assert [other.field for other in result.rows if not other.agrees] == [setting]


def test_settings_of_training_speed_and_the_optimizer_pass():
    settings = {
        "moe_aux_loss_coeff": 0.01,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "optimizer_offload_fraction": 1.0,
        "layernorm_epsilon": 1e-6,
    }
    result = diff_config(toy_hf_config("qwen3_moe"), trainer(**settings))
    assert result.agrees
    assert "changes losses that balance the experts; default 0.0" in row_of(result, "moe_aux_loss_coeff").note
    assert "changes activations that are computed again" in row_of(result, "recompute_method").note
    assert "not a model setting: the optimizer on the host" in row_of(result, "optimizer_offload_fraction").note
    assert row_of(result, "layernorm_epsilon").note == ""


def test_a_key_that_nothing_reads_fails_unless_it_is_off_or_known_not_to_matter():
    config = toy_hf_config("qwen3", attention_sink=True, residual_scale=None, use_cache=True, transformers_version="5")
    result = diff_config(config, trainer())
    assert result.unread == {"attention_sink": True}
    assert not result.agrees
    assert {"residual_scale", "use_cache", "transformers_version"} <= set(result.irrelevant)
    assert diff_config(toy_hf_config("qwen3", layer_types=["full_attention"] * 4), trainer()).agrees
    assert not diff_config(toy_hf_config("qwen3", layer_types=["linear_attention"] * 4), trainer()).agrees


def test_keys_that_only_repeat_others_need_not_be_read_and_fail_where_they_contradict():
    config = toy_hf_config("deepseek_v3", qk_head_dim=48, head_dim=16, num_key_value_heads=4)
    nope, rope, heads = (config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "num_attention_heads"))
    repeated = {"qk_head_dim": nope + rope, "head_dim": rope, "num_key_value_heads": heads}
    assert diff_config({**config, **repeated}, trainer()).unread == {}
    for key, value in repeated.items():
        assert diff_config({**config, **repeated, key: 2 * value}, trainer()).unread == {key: 2 * value}


def test_the_command_prints_a_table_and_its_exit_code_is_the_verdict(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(toy_hf_config("qwen3_moe")))
    for setting, code, says in [
        ("trainer.megatron.moe_z_loss_coeff=0.1", 0, "the trainer builds this model"),
        ("trainer.megatron.moe_router_topk=4", 2, "is the model's"),
        ("trainer.megatron.no_such=1", 2, "no such"),
    ]:
        result = CliRunner().invoke(app, ["diff-config", str(tmp_path), RECIPE, setting])
        assert result.exit_code == code, result.output
        assert says in result.output
    result = CliRunner().invoke(app, ["diff-config", str(tmp_path), RECIPE, "--json"])
    assert json.loads(result.stdout)["agrees"] is True


def test_every_fact_of_every_family_is_of_the_model_or_its_training():
    for family in TOYS:
        for row in diff_config(toy_hf_config(family), trainer()).rows:
            of_the_model = ("vocab_size", "tie_embeddings", "max_position", "llama3_rope_factor", "mtp_layers",
                            "qk_norm_over_heads", "float32_router")  # fmt: skip
            known = row.field in MEGATRON_VERDICTS or row.field.startswith("yarn_")
            assert known or row.field in of_the_model, row.field
