"""A model with sparse attention is refused where an engine or a pipeline stage could not compute it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from slimrl import device
from slimrl.config.pipeline_stages import first_layers
from slimrl.config.problems import Problem
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.config.schema.trainer import CriticConfig, MtpConfig, ParallelConfig, TrainerConfig
from slimrl.models.families.deepseek_v32 import indexed_layers
from slimrl.models.family import family_of
from slimrl.models.hf_config import published_config
from slimrl.models.offline_recipe import model_violations
from slimrl.runtime.checks.sparse_attention_check import sparse_attention_problems
from slimrl.toys.toy_configs import TOYS, ToySize
from slimrl.trainer.layout.source_layout import planned_stages

CONFIG = {**TOYS["glm_moe_dsa"](ToySize(layers=4)), "vocab_size": 300, "index_topk": 64}
"""With an indexer in every other layer."""


def problems(command="train", hf_config=CONFIG, longest=64):
    loaded = SimpleNamespace(
        recipe=SimpleNamespace(rollout=RolloutConfig(max_trajectory_tokens=longest)),
        command=command,
        problem=lambda key, message: Problem(key=key, message=message),
    )
    return [f"{problem.key}: {problem.message}" for problem in sparse_attention_problems(loaded, hf_config)]


def violations(command="train", hf_config=CONFIG, critic=None, **trainer):
    """What `model_violations` says of a trainer, and of a critic with other settings of it."""
    given = TrainerConfig(precision=Precision.fp32, **trainer)
    recipe = replace(Recipe(), trainer=given)
    if critic is not None:
        algorithm = replace(recipe.algorithm, advantage="gae")
        recipe = replace(recipe, algorithm=algorithm, critic=CriticConfig(trainer=replace(given, **critic)))
    return list(model_violations(SimpleNamespace(recipe=recipe, command=command), hf_config))


def test_trajectories_longer_than_what_an_indexer_chooses_need_a_gpu(monkeypatch):
    said = (
        "rollout.max_trajectory_tokens: 65: SGLang has no sparse attention on a CPU. Up to index_topk, 64 tokens, it "
        "is dense. Use 64 or less."
    )
    monkeypatch.setattr(device, "device_type", lambda: "cpu")
    assert problems() == []
    assert problems(longest=65) == [said]
    assert problems("sft", longest=65) == []
    assert problems(longest=65, hf_config=TOYS["deepseek_v3"](ToySize())) == []
    monkeypatch.setattr(device, "device_type", lambda: "cuda")
    assert problems(longest=65) == []


def test_a_pipeline_stage_begins_with_a_layer_that_has_an_indexer():
    two, four = ParallelConfig(pipeline=2), ParallelConfig(pipeline=4)
    assert violations(num_ranks=2, parallel=two) == []
    said = (
        "4: stages begin with the layers 1, 3, which take the choice of the indexer of the layer before. Those with an "
        "indexer are 0, 2."
    )
    assert violations(num_ranks=4, parallel=four) == [("trainer.parallel.pipeline", said)]
    assert violations("rollout", num_ranks=4, parallel=four) == []
    uneven = {"num_layers_in_first_pipeline_stage": 1}
    ((key, _),) = violations(num_ranks=2, parallel=two, critic={"megatron": uneven})
    assert key == "critic.trainer.parallel.pipeline"
    assert violations("sft", num_ranks=2, parallel=two, critic={"megatron": uneven}) == []


@pytest.mark.parametrize(
    ("parallel", "megatron"),
    [
        ({"pipeline": 1}, {}),
        ({"pipeline": 4}, {}),
        ({"pipeline": 3, "virtual_pipeline": 2}, {}),
        ({"pipeline": 3}, {"num_layers_in_first_pipeline_stage": 2}),
        ({"pipeline": 4}, {"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 5}),
        (
            {"pipeline": 3, "virtual_pipeline": 2},
            {"num_layers_in_first_pipeline_stage": 2, "num_layers_in_last_pipeline_stage": 6},
        ),
        ({"pipeline": 2}, {"num_layers_in_first_pipeline_stage": 5, "num_layers_in_last_pipeline_stage": 7}),
        (
            {"pipeline": 7},
            {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
        ),
        ({"pipeline": 2, "virtual_pipeline": 2}, {"pipeline_model_parallel_layout": "Et*3,|(tt|)*2,t*5,L"}),
        ({"pipeline": 3}, {"pipeline_model_parallel_layout": "E|(tt)*6|L"}),
        (
            {"pipeline": 2},
            {
                "pipeline_model_parallel_layout": [
                    ["embedding", *["decoder"] * 9],
                    ["decoder", "Decoder", "decoder", "loss"],
                ]
            },
        ),
    ],
)
def test_the_first_layers_of_stages_are_those_of_megatron(parallel, megatron):
    trainer = TrainerConfig(precision=Precision.fp32, parallel=ParallelConfig(**parallel), megatron=megatron)
    config = {**TOYS["qwen3"](ToySize(layers=12)), "vocab_size": 300}
    stages = planned_stages(trainer, family_of(config).megatron_config(config))
    assert first_layers(trainer, 12) == sorted(layer for held in stages for layer in held if layer - 1 not in held)


@pytest.mark.parametrize(("pipeline", "layout"), [(5, None), (2, "Et|tL"), (2, [["embedding"], ["decoder"]])])
def test_stages_that_do_not_hold_the_layers_are_left_to_other_rules(pipeline, layout):
    megatron = {"pipeline_model_parallel_layout": layout} if layout else {}
    trainer = TrainerConfig(precision=Precision.fp32, parallel=ParallelConfig(pipeline=pipeline), megatron=megatron)
    assert first_layers(trainer, 12) == []


def test_a_config_that_no_family_builds_is_the_only_problem():
    ((key, message),) = violations(hf_config={**CONFIG, "rope_interleave": False}, parallel=ParallelConfig(pipeline=4))
    assert key == "model.path"
    assert "rope_interleave" in message


def test_layers_do_not_recompute_attention_with_the_choice_of_the_layer_for_multi_token_prediction():
    full = {"recompute_granularity": "full"}
    mtp, config = MtpConfig(train=True), {**CONFIG, "num_nextn_predict_layers": 1}

    def keys(hf_config=config, **trainer):
        return [key for key, _ in violations(hf_config=hf_config, **{"mtp": mtp, **trainer})]

    assert keys(megatron=full) == ["trainer.mtp.train"]
    assert keys(megatron={"recompute_granularity": "selective"}) == ["trainer.mtp.train"]
    assert keys(megatron={"recompute_granularity": "selective", "recompute_modules": ["moe"]}) == []
    assert keys() == keys(megatron=full, mtp=MtpConfig()) == []
    assert keys(megatron=full, num_ranks=2, parallel=ParallelConfig(pipeline=2)) == []
    for kinds in (["full"] * 4, ["full", "full", "shared", "full"]):
        assert keys({**config, "indexer_types": kinds}, megatron=full) == []


def test_layers_for_multi_token_prediction_that_megatron_would_build_without_an_indexer_are_refused():
    def found(count, kinds, train=True):
        config = {**CONFIG, "num_nextn_predict_layers": count, "indexer_types": kinds}
        return violations(hf_config=config, mtp=MtpConfig(train=train))

    shared = ["full", "shared", "full", "shared"]
    ((key, message),) = found(2, shared)
    assert key == "trainer.mtp.train"
    assert "of the 2 layers for multi-token prediction megatron-core would build number 2 without an indexer" in message
    assert found(1, shared) == found(2, ["full"] * 4) == found(2, shared, train=False) == []


@pytest.mark.parametrize(
    ("kind", "refused"), [("a2a", True), (["allgather", "p2p"], True), ("all_gather", False), (["allgather"], False)]
)
def test_context_parallelism_of_sparse_attention_gathers(kind, refused):
    found = violations(num_ranks=2, parallel=ParallelConfig(context=2), megatron={"cp_comm_type": kind})
    said = f"{kind}: sparse attention has allgather alone. Leave it out."
    assert found == ([("trainer.megatron.cp_comm_type", said)] if refused else [])


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
    given = {"megatron": {"dsa_indexer_loss_coeff": 0.1}}
    (said,) = violations(hf_config={**TOYS["deepseek_v3"](ToySize()), "vocab_size": 300}, **given)
    assert said == (
        "trainer.megatron.dsa_indexer_loss_coeff",
        "has no effect: the model has no sparse attention. Leave it out.",
    )
    assert violations(**given) == []
