"""A model with sparse attention is refused where an engine or a pipeline stage could not compute it."""

from types import SimpleNamespace

import pytest

from slimrl import device
from slimrl.config.problems import Problem
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.config.schema.trainer import ParallelConfig, TrainerConfig
from slimrl.models.families.deepseek_v32 import indexed_layers
from slimrl.models.family import family_of
from slimrl.models.hf_config import published_config
from slimrl.models.offline_recipe import model_violations
from slimrl.runtime.checks.sparse_attention_check import sparse_attention_problems
from slimrl.toys.toy_configs import TOYS, ToySize

CONFIG = {**TOYS["glm_moe_dsa"](ToySize(layers=4)), "vocab_size": 300, "index_topk": 64}
"""With an indexer in every other layer."""


def problems(command="train", hf_config=CONFIG, longest=64, devices=True, **trainer):
    recipe = SimpleNamespace(
        rollout=RolloutConfig(max_trajectory_tokens=longest),
        trainer=TrainerConfig(precision=Precision.fp32, **trainer),
    )
    loaded = SimpleNamespace(
        recipe=recipe, command=command, problem=lambda key, message: Problem(key=key, message=message)
    )
    found = sparse_attention_problems(loaded, hf_config, devices=devices)
    return [f"{problem.key}: {problem.message}" for problem in found]


def test_trajectories_longer_than_what_an_indexer_chooses_need_a_gpu(monkeypatch):
    said = (
        "rollout.max_trajectory_tokens: 65: SGLang has no sparse attention on a CPU. Up to index_topk, 64 tokens, it "
        "is dense. Use 64 or less."
    )
    monkeypatch.setattr(device, "device_type", lambda: "cpu")
    assert problems() == []
    assert problems(longest=65) == [said]
    assert problems(longest=65, devices=False) == []
    assert problems("sft", longest=65) == []
    monkeypatch.setattr(device, "device_type", lambda: "cuda")
    assert problems(longest=65) == []


def test_a_pipeline_stage_begins_with_a_layer_that_has_an_indexer():
    assert problems(num_ranks=2, parallel=ParallelConfig(pipeline=2)) == []
    (said,) = problems(num_ranks=4, parallel=ParallelConfig(pipeline=4))
    assert said == (
        "trainer.parallel.pipeline: 4: stages begin with the layers 1, 3, which take the choice of the indexer of the "
        "layer before. Those with an indexer are 0, 2."
    )
    assert problems("rollout", num_ranks=4, parallel=ParallelConfig(pipeline=4)) == []


@pytest.mark.parametrize(
    ("given", "indexed"),
    [
        ({}, (0, 1, 2, 3, 4, 5)),
        ({"index_topk_freq": 2}, (0, 1, 3, 5)),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 1}, (0, 3)),
        ({"indexer_types": ["full", "shared", "full", "shared", "full", "shared"]}, (0, 2, 4)),
        ({"index_topk_pattern": "FFSFSF"}, (0, 1, 3, 5)),
    ],
)
def test_layers_with_an_indexer_are_those_of_sglang_and_of_megatron(given, indexed):
    from megatron.core.transformer.experimental_attention_variant.dsa import is_dsa_skip_topk_layer

    config = {**published_config("GLM-5"), "num_hidden_layers": 6, **given}
    assert indexed_layers(config) == indexed
    facts = family_of(config).megatron_config(config).transformer
    period, offset = facts["dsa_indexer_topk_freq"], facts["dsa_indexer_skip_topk_offset"]
    assert tuple(layer for layer in range(6) if not is_dsa_skip_topk_layer(layer + 1, offset, period)) == indexed


def test_layers_without_a_period_are_refused():
    config = {**CONFIG, "num_hidden_layers": 6, "indexer_types": ["full", "full", "shared", "full", "full", "shared"]}
    with pytest.raises(ValueError, match="not supported for glm_moe_dsa: indexer_types have no period"):
        family_of(config).megatron_config(config)
    with pytest.raises(ValueError, match="5 indexer_types or index_topk_pattern for 6 layers"):
        indexed_layers({**config, "indexer_types": config["indexer_types"][1:]})


def test_settings_of_indexers_are_refused_for_a_model_that_has_none():
    trainer = TrainerConfig(precision=Precision.fp32, megatron={"dsa_indexer_loss_coeff": 0.1})
    recipe = SimpleNamespace(trainer=trainer, model=SimpleNamespace(path="m"), has_critic=False)
    loaded = SimpleNamespace(recipe=recipe, command="train")
    plain = {**TOYS["deepseek_v3"](ToySize()), "vocab_size": 300}
    (said,) = model_violations(loaded, plain)
    assert said == (
        "trainer.megatron.dsa_indexer_loss_coeff",
        "has no effect: the model has no sparse attention. Leave it out.",
    )
    assert list(model_violations(loaded, CONFIG)) == []
