"""What a recipe becomes in Megatron's terms."""

import dataclasses
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import megatron.core.utils as megatron_utils
import pytest
import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from packaging.version import Version
from slimrl_tools.toy_configs import ToySize, toy_config

from slimrl import device
from slimrl.config.alignment import tile_tokens
from slimrl.config.passthrough import LATENT_ATTENTION, OWNED
from slimrl.config.schema import LrSchedule, OptimizerConfig, TrainerConfig
from slimrl.config.trainer_rules import RECOMPUTABLE, STATE_DTYPES
from slimrl.models.architecture import FACTS_FILE, architecture_of, check_architecture
from slimrl.models.family import family_of
from slimrl.models.megatron_config import LLAMA3_ROPE
from slimrl.models.planned_recipe import read_planned
from slimrl.trainer.build import ddp_config, padded_vocab, transformer_config
from slimrl.trainer.optimizer import build_scheduler
from slimrl.trainer.passthrough import SECTIONS, fields_for

RECIPES = Path(__file__).parents[2] / "recipes"


def rates(updates, **settings):
    optimizer = SimpleNamespace(param_groups=[{}])
    trainer = TrainerConfig(max_tokens_per_rank=1, optimizer=OptimizerConfig(lr=2.0, **settings))
    scheduler = build_scheduler(trainer, optimizer, updates)
    result = []
    for _ in range(updates):
        scheduler.step(1)
        result.append(optimizer.param_groups[0]["lr"])
    return result


def test_the_constant_schedule_warms_up_linearly_to_its_rate():
    assert rates(6, warmup_steps=4) == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0, 2.0])


def test_the_linear_schedule_ends_at_the_smallest_rate():
    assert rates(6, warmup_steps=2, schedule=LrSchedule.linear, min_lr=0.4) == pytest.approx(
        [1.0, 2.0, 1.6, 1.2, 0.8, 0.4]
    )


def test_the_cosine_schedule_follows_half_a_cosine():
    expected = [0.2 + 1.8 * (1 + math.cos(math.pi * n / 5)) / 2 for n in range(1, 6)]
    assert rates(5, schedule=LrSchedule.cosine, min_lr=0.2) == pytest.approx(expected)


def test_a_warm_up_that_leaves_no_schedule_is_refused():
    with pytest.raises(ValueError, match="5 updates of warm-up leave none of the 5 updates"):
        rates(5, warmup_steps=5, schedule=LrSchedule.linear)


@pytest.mark.parametrize(
    ("vocab", "tensor", "rows"), [(101, 1, 101), (101, 2, 102), (104, 8, 104), (151936, 4, 151936)]
)
def test_the_vocabulary_is_padded_to_what_tensor_parallelism_divides(vocab, tensor, rows):
    assert padded_vocab(vocab, tensor) == rows


def trainer(**megatron):
    return TrainerConfig(max_tokens_per_rank=1, optimizer=OptimizerConfig(lr=1.0), megatron=megatron)


MODEL = SimpleNamespace(
    multi_latent_attention=False,
    transformer={"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "activation_func": "silu"},
)


def test_passed_through_fields_reach_the_configuration_that_has_them():
    settings = trainer(overlap_grad_reduce=True, recompute_granularity="selective", activation_func="relu")
    assert ddp_config(settings).overlap_grad_reduce
    config = transformer_config(settings, MODEL)
    assert config.recompute_granularity == "selective"
    assert config.activation_func is torch.nn.functional.relu


def test_a_dtype_of_the_optimizer_s_states_is_given_by_its_name():
    given = dict(zip(STATE_DTYPES, ("float16", "bfloat16", "uint8"), strict=True))
    values = fields_for(MegatronOptimizerConfig, given)
    assert values == dict(zip(STATE_DTYPES, (torch.float16, torch.bfloat16, torch.uint8), strict=True))


def test_modules_to_recompute_are_those_that_megatron_names():
    with pytest.raises(AssertionError) as caught:
        transformer_config(trainer(recompute_granularity="selective", recompute_modules=["none"]), MODEL)
    allowed = re.findall(r"'(\w+)'", str(caught.value).partition("Allowed")[2])
    assert sorted(allowed) == sorted(RECOMPUTABLE)


@pytest.mark.parametrize(("name", "setting"), sorted(OWNED["trainer.megatron"].items()))
def test_a_field_with_a_setting_of_its_own_is_refused_by_that_setting(name, setting):
    with pytest.raises(ValueError, match=f"trainer.megatron.{name}: set {setting} instead"):
        fields_for(SECTIONS[0], {name: 1})


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
@pytest.mark.parametrize("name", ["kv_lora_rank", "rotary_base", "rotary_scaling_factor"])
def test_fields_of_latent_attention_are_the_model_s_whatever_attention_it_has(family, name):
    config = toy_config(family, ToySize()) | {"vocab_size": 128}
    with pytest.raises(ValueError, match=rf"trainer\.megatron\.{name}: is the model's: trainer and engines take"):
        transformer_config(trainer(**{name: 64}), family_of(config).megatron_config(config))


def test_no_field_of_latent_attention_is_missed():
    latent, plain = (
        {field.name for field in dataclasses.fields(kind)} for kind in (MLATransformerConfig, TransformerConfig)
    )
    assert set(LATENT_ATTENTION) == (latent - plain) | {"multi_latent_attention"}


def test_an_unknown_field_is_refused():
    with pytest.raises(ValueError, match=r"trainer\.megatron\.num_layerz: no such field"):
        transformer_config(trainer(num_layerz=3), MODEL)


def test_fp8_without_a_gpu_is_refused():
    with pytest.raises(ValueError, match="FP8 training needs a GPU"):
        transformer_config(trainer(fp8="hybrid"), MODEL)


def test_megatron_takes_the_recipe_of_fp8_training_where_transformer_engine_is(monkeypatch):
    planned = read_planned(RECIPES / "qwen3_moe" / "qwen3_30b_a3b_gspo_fp8_training.yaml", [], "train")
    monkeypatch.setattr(device, "has_transformer_engine", lambda: True)
    monkeypatch.setattr(megatron_utils, "_te_version", Version("2.3"))
    family = family_of(planned.hf_config)
    config = transformer_config(planned.loaded.recipe.trainer, family.megatron_config(planned.hf_config))
    assert (config.fp8, config.fp8_recipe, config.moe_grouped_gemm) == ("e4m3", "blockwise", True)
    # Tokens of an expert are padded in front of its layers, those of the rest by packing to as many.
    assert get_align_size_for_quantization(config) == tile_tokens(planned.loaded.recipe.trainer.megatron) == 16
    config.fp8_recipe = "mxfp8"
    assert get_align_size_for_quantization(config) == tile_tokens({"fp8": "e4m3", "fp8_recipe": "mxfp8"}) == 32


def test_a_checkpoint_of_another_model_is_refused_with_every_difference_at_once(tmp_path):
    saved = {"hidden_size": 64, "num_layers": 4, "moe_layer_freq": [1, 1]}
    (tmp_path / FACTS_FILE).write_text(json.dumps({"architecture": saved}))
    with pytest.raises(ValueError, match="hidden_size is 64 there and 32 here; num_experts is absent there and 8 here"):
        check_architecture(tmp_path, {**saved, "hidden_size": 32, "num_experts": 8})


LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e6, "factor": 8.0, **LLAMA3_ROPE}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7}},
            r"rotary_base is 1000000\.0 there and 10000000",
        ),
        ({"tie_word_embeddings": True}, "tie_embeddings is False there and True here"),
        ({"rope_parameters": LLAMA3}, r"llama3_rope_factor is None there and 8\.0 here"),
    ],
)
def test_a_checkpoint_whose_model_differs_outside_of_its_layers_is_refused(tmp_path, config, says):
    saved = toy_config("llama", ToySize()) | {
        "vocab_size": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }
    (tmp_path / FACTS_FILE).write_text(json.dumps({"architecture": architecture_of(saved)}))
    check_architecture(tmp_path, architecture_of(saved | {"dtype": "bfloat16"}))
    with pytest.raises(ValueError, match=says):
        check_architecture(tmp_path, architecture_of(saved | config))
