"""The planner's formulas against closed forms, published sizes and each other."""

from dataclasses import replace
from math import floor, prod

import pytest
from published_sizes import PUBLISHED_SIZES
from slimrl_tools.toy.toy_configs import ToySize, toy_config

from slimrl.config.schema.precision import Fp8Scaling, Precision
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.config.schema.trainer import MtpConfig, OptimizerConfig, ParallelConfig, TrainerConfig
from slimrl.config.trainer_rules import RECOMPUTABLE
from slimrl.data.model_weights import TensorPart, num_rows
from slimrl.estimates.planner.activations import kept, layer_bytes, logits_bytes, stage_activations
from slimrl.estimates.planner.engine import engine_weight_bytes, kv_bytes_per_token
from slimrl.estimates.planner.hardware import Hardware
from slimrl.estimates.planner.model_state import buffer_elements, state_bytes
from slimrl.estimates.planner.parameters import (
    ChunkParameters,
    ModelParameters,
    ParameterTable,
    built_stages,
    model_parameters,
    stage_total,
)
from slimrl.estimates.planner.schedule import bubble_fraction, chunks_in_flight
from slimrl.estimates.planner.shape import Shape
from slimrl.estimates.planner.suggest import divided_layers
from slimrl.estimates.planner.work import forward_flops_per_token
from slimrl.estimates.resync.command import replicated_names
from slimrl.models.draft import draft_specs
from slimrl.models.family import family_of
from slimrl.models.hf_config import published_config, published_names

SUPPORTED = published_names()


def shape_of(name: str) -> Shape:
    config = published_config(name)
    return Shape.of(family_of(config).megatron_config(config))


def trainer(num_ranks: int = 1, *, precision: Precision = Precision.bf16, **settings) -> TrainerConfig:
    parallel = {name: settings.pop(name) for name in list(settings) if hasattr(ParallelConfig(), name)}
    return TrainerConfig(
        num_ranks=num_ranks,
        parallel=ParallelConfig(**parallel),
        optimizer=OptimizerConfig(lr=1e-6, distributed=settings.pop("distributed", True)),
        precision=precision,
        **{"max_tokens_per_rank": 1000, "logprob_chunk_tokens": 100, **settings},
    )


def counted(name: str) -> tuple[ModelParameters, float]:
    """What is counted of a published model, and billions of its embedding, of which a head of its own is as large."""
    config = published_config(name)
    family = family_of(config)
    found = model_parameters(family.weight_map(config), family.megatron_config(config))
    return found, config["vocab_size"] * config["hidden_size"] / 1e9


WITHOUT_EMBEDDING = {"DeepSeek-V3", "DeepSeek-V3.2", "Kimi-K2", "Kimi-K2.5", "gpt-oss-20b", "gpt-oss-120b"}
"""Their authors' active parameters leave out the embedding, in which a token is looked up."""
WITHOUT_EMBEDDING_AND_HEAD = {"GLM-4.5", "GLM-4.5-Air", "GLM-4.7-Flash", "GLM-5", "MiniMax-M2", "Qwen3-Next-80B-A3B"}
"""Theirs leave out the head too."""

ROUNDED_TO_A_TENTH = {
    # 1.72B, published as 1.7B, 1.2% apart.
    "Qwen3-1.7B",
    # 1.28B, published as 1.3B, 1.4% apart.
    "OLMoE-1B-7B-0924",
}
CUT_TO_A_TENTH = {"Qwen3-30B-A3B", "Qwen3-VL-30B-A3B"}
"""3.353B, published as 3.3B: the digits that follow are left off. 1.6% apart."""
ROUNDED_TO_A_BILLION = {
    # 36.63B, published as 37B, 1.02% apart; as 36.7B in its README_WEIGHTS.md, see the next test.
    "DeepSeek-V3",
    # 37.48B, published as 37B, 1.3% apart.
    "DeepSeek-V3.2",
    # 3.26B, published as 3B, 8.7% apart; 3.90B with embedding and head.
    "GLM-4.7-Flash",
    # 20.68B, published as 21B, 1.5% apart.
    "Hy3",
    # 9.80B, published as 10B, 2% apart.
    "MiniMax-M2",
    # 12.18B, published as 12B, 1.5% apart, and nowhere closer.
    "GLM-4.5-Air",
    # 2.91B, published as 3B, 2.9% apart; closer without embedding and head, see the next test.
    "Moonlight-16B-A3B",
    # 3.25B, published as 3B, 8.4% apart; 3.87B with embedding and head, further still.
    "Qwen3-Next-80B-A3B",
    # 3.45B, published as 3B, 15% apart; 2.95B without embedding, 2.44B without embedding and head.
    "Qwen3.5-35B-A3B",
    # 17.35B, published as 17B, 2.1% apart.
    "Qwen3.5-397B-A17B",
}
"""Models whose published active parameters are rounded by more than 1%, and so are compared once rounded alike."""


@pytest.mark.parametrize("name", SUPPORTED)
def test_total_and_active_parameters_are_the_published_ones_within_a_percent(name):
    found, embedding_b = counted(name)
    published = PUBLISHED_SIZES[name]
    if name in ROUNDED_TO_A_TENTH:
        assert (round(found.total / 1e9, 1), round(found.active / 1e9, 1)) == published
        return
    # The published 1T of Kimi-K2 is rounded from 1026B.
    assert found.total / 1e9 == pytest.approx(1026 if name.startswith("Kimi-K2") else published.total_b, rel=0.01)
    active_b = found.active / 1e9
    if name in WITHOUT_EMBEDDING | WITHOUT_EMBEDDING_AND_HEAD:
        active_b = found.active_without_embedding / 1e9
    if name in WITHOUT_EMBEDDING_AND_HEAD:
        active_b -= embedding_b
    if name in CUT_TO_A_TENTH:
        assert floor(10 * active_b) / 10 == published.active_b
    elif name in ROUNDED_TO_A_BILLION:
        assert round(active_b) == published.active_b
    else:
        assert active_b == pytest.approx(published.active_b, rel=0.01)


@pytest.mark.parametrize(
    ("name", "total_b", "active_b"),
    [
        # arXiv:2502.16982: neither embedding nor head.
        ("Moonlight-16B-A3B", 15.29, 2.24),
        # Model cards: "non-embedding".
        ("Qwen3-4B", 3.6, 3.6),
        ("Qwen3-8B", 6.95, 6.95),
        ("Qwen3-30B-A3B", 29.9, None),
        ("Qwen3-235B-A22B", 234, None),
        ("Qwen3-Next-80B-A3B", 79, None),
    ],
)
def test_parameters_besides_embedding_and_head_are_the_published_ones_within_a_percent(name, total_b, active_b):
    found, embedding_b = counted(name)
    left_out_b = embedding_b if published_config(name)["tie_word_embeddings"] else 2 * embedding_b
    assert found.total / 1e9 - left_out_b == pytest.approx(total_b, rel=0.01)
    if active_b is not None:
        assert found.active / 1e9 - left_out_b == pytest.approx(active_b, rel=0.01)


def test_active_parameters_of_deepseek_v3_are_those_of_its_notes_on_weights_within_a_percent():
    found, _ = counted("DeepSeek-V3")
    assert found.active_without_embedding / 1e9 == pytest.approx(36.7, rel=0.01)


def test_the_cache_of_grouped_queries_has_keys_and_values_of_a_ranks_heads_in_every_layer():
    shape = shape_of("Qwen3-30B-A3B")
    assert kv_bytes_per_token(shape, 1, 2) == 48 * 2 * 4 * 128 * 2
    assert kv_bytes_per_token(shape, 2, 2) == 48 * 2 * 2 * 128 * 2
    # Eight ranks share four heads in pairs.
    assert kv_bytes_per_token(shape, 8, 2) == kv_bytes_per_token(shape, 4, 2) == 48 * 2 * 128 * 2
    assert kv_bytes_per_token(shape, 4, 1) == 48 * 2 * 128


def test_the_cache_of_latent_attention_is_whole_on_every_rank():
    shape = shape_of("DeepSeek-V3")
    assert kv_bytes_per_token(shape, 1, 2) == kv_bytes_per_token(shape, 16, 2) == 61 * (512 + 64) * 2


def test_gated_delta_nets_have_no_cache_and_their_work_does_not_grow_with_the_context():
    shape = shape_of("Qwen3-Next-80B-A3B")
    assert kv_bytes_per_token(shape, 1, 2) == 12 * 2 * 2 * 256 * 2
    parameters, _ = counted("Qwen3-Next-80B-A3B")
    short, long = (forward_flops_per_token(shape, parameters, length) for length in (1000, 2000))
    assert long - short == 1000 * 12 * 16 * 2 * 256
    state = 36 * 32 * (6 * 128 * 128 + 2 * 64 * (128 + 128))
    assert short == 2 * parameters.active_without_embedding + state + 1000 * 12 * 16 * 2 * 256


def test_layers_of_qwen3_next_keep_what_their_table_says():
    shape = shape_of("Qwen3-Next-80B-A3B")
    linear, attention = (layer_bytes(shape, trainer(), sparse=True, linear=kind) for kind in (True, False))
    keys, values, copied = 16 * 128, 32 * 128, 32 * 128
    assert linear.projections == 1000 * 2 * (2 * (2 * keys + values) + values + 2 * copied)
    assert (linear.attention, linear.statistics) == (1000 * 2 * 2 * values, 1000 * 4 * 2 * 32)
    assert attention.projections == 1000 * 2 * (2 * (16 + 2) * 256 + 2 * 256)
    assert (attention.attention, attention.statistics) == (1000 * 2 * 3 * 16 * 256, 1000 * 4 * 16)
    assert (linear.router, linear.shared, linear.norms) == (attention.router, attention.shared, attention.norms)


def test_an_engine_cuts_all_weights_but_norms_and_routers_and_shares_heads_that_are_too_few():
    config = published_config("Qwen3-30B-A3B")
    weight_map = family_of(config).weight_map(config)
    parts = [
        TensorPart(spec=spec, start=0, stop=num_rows(spec), offset=0, nbytes=2 * prod(spec.shape))
        for spec in weight_map.specs("bfloat16")
    ]
    hidden, layers, experts, head = 2048, 48, 128, 128
    attention = layers * hidden * head * (32 + 2 * 4 + 32)
    mlp = layers * experts * 3 * hidden * 768
    whole = layers * (2 * hidden + 2 * head + experts * hidden) + hidden
    recipe = Recipe(rollout=RolloutConfig(engine_tp=4))
    shape, replicated = shape_of("Qwen3-30B-A3B"), replicated_names(weight_map)
    embedding = 151936 * hidden
    cut = attention + mlp + 2 * embedding
    assert engine_weight_bytes(recipe, shape, parts, replicated) == (2 * (cut // 4 + whole), 2 * mlp // 4)
    # Eight ranks have four heads of keys and values, so each is on two of them.
    recipe.rollout.engine_tp = 8
    found, experts = engine_weight_bytes(recipe, shape, parts, replicated)
    assert found == 2 * ((cut + layers * hidden * head * 2 * 4) // 8 + whole)
    # Four groups of two ranks, which share the four heads; the output layer is cut as before.
    recipe.rollout.engine_attention_dp = 4
    assert engine_weight_bytes(recipe, shape, parts, replicated) == (
        2 * ((mlp + embedding) // 8 + (attention + embedding) // 2 + whole),
        experts,
    )


@pytest.mark.parametrize(
    ("layers", "pipeline", "held"), [(8, 4, [2, 2, 2, 2]), (61, 4, [16, 16, 16, 13]), (94, 8, [12] * 7 + [10])]
)
def test_suggested_pipelines_have_as_many_layers_on_every_stage_but_the_last(layers, pipeline, held):
    divided = divided_layers(layers, pipeline)
    assert [len(stage) for stage in divided] == held
    assert [layer for stage in divided for layer in stage] == list(range(layers))


def test_a_pipeline_whose_last_stage_would_be_empty_is_not_suggested():
    assert divided_layers(6, 4) is None
    assert divided_layers(4, 5) is None


def test_a_pipeline_waits_for_as_many_micro_batches_as_it_has_stages_but_one():
    plain = ParallelConfig(pipeline=4)
    assert bubble_fraction(ParallelConfig(), 7) == 0
    assert bubble_fraction(plain, 9) == pytest.approx(3 / 12)
    assert bubble_fraction(replace(plain, virtual_pipeline=2), 9) == pytest.approx(3 / 21)
    assert [chunks_in_flight(plain, stage, 9) for stage in range(4)] == [4, 3, 2, 1]
    assert [chunks_in_flight(plain, stage, 2) for stage in range(4)] == [2, 2, 2, 1]
    interleaved = replace(plain, virtual_pipeline=2)
    assert [chunks_in_flight(interleaved, stage, 8) for stage in range(4)] == [11, 9, 7, 5]


def test_buffers_are_aligned_by_parameter_and_at_the_end():
    assert buffer_elements([10, 100], 128) == 256
    assert buffer_elements([100, 10], 128) == 256
    assert buffer_elements([64, 64], 128) == 128
    assert buffer_elements([], 128) == 0


BIG = (ChunkParameters(dense=(1 << 20,), experts=(1 << 22,)),)
DENSE, EXPERTS = 1 << 20, 1 << 22


def test_states_in_bf16_are_two_four_and_twelve_bytes_over_their_own_data_ranks():
    state = state_bytes(BIG, trainer(16, tensor=2, sequence=True, expert=4))
    assert state.weights == 2 * (DENSE + EXPERTS)
    assert state.gradients == 4 * (DENSE + EXPERTS)
    assert state.optimizer == 12 * DENSE // 8 + 12 * EXPERTS // 4
    whole = state_bytes(BIG, trainer(16, distributed=False))
    assert whole.optimizer == 12 * (DENSE + EXPERTS)


def test_states_in_fp32_have_no_main_weights():
    state = state_bytes(BIG, trainer(4, precision=Precision.fp32))
    assert state.weights == state.gradients == 4 * (DENSE + EXPERTS)
    assert state.optimizer == 8 * (DENSE + EXPERTS) // 4


def test_a_precision_aware_optimizer_and_offloading_take_what_their_fields_say():
    aware = {
        "use_precision_aware_optimizer": True,
        "exp_avg_dtype": "bfloat16",
        "exp_avg_sq_dtype": "bfloat16",
        "grad_reduce_in_fp32": False,
    }
    state = state_bytes(BIG, trainer(1, megatron=aware))
    assert state.gradients == 2 * (DENSE + EXPERTS)
    assert state.optimizer == 8 * (DENSE + EXPERTS)
    offload = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.75}
    state = state_bytes(BIG, trainer(1, megatron=offload))
    assert state.optimizer == 3 * (DENSE + EXPERTS)
    # Main weights, two moments and a copy of the gradients.
    assert state.host == 0.75 * 16 * (DENSE + EXPERTS)


def test_the_planner_knows_every_module_that_can_be_recomputed():
    layer = layer_bytes(shape_of("DeepSeek-V3"), trainer(), sparse=True)
    for module in RECOMPUTABLE:
        assert kept(layer, [module]).total < layer.total or module == "mlp"
    assert kept(layer, RECOMPUTABLE).total == layer.residual + layer.latents + layer.attention


def test_a_dense_layer_keeps_what_its_table_says():
    shape = shape_of("Qwen3-8B")
    found = layer_bytes(shape, trainer(), sparse=False)
    hidden, ffn, queries, keys = 4096, 12288, 32 * 128, 8 * 128
    columns = 4 * hidden + 2 * (queries + keys) + keys + queries + 3 * ffn
    assert found.total == 1000 * (2 * columns + 4 * 32)


def test_everything_that_is_kept_is_cut_by_tensor_parallelism_with_sequence_parallelism():
    for name in ("Qwen3-30B-A3B", "Qwen3-8B", "DeepSeek-V3"):
        shape = shape_of(name)
        sparse = shape.sparse[-1]
        whole = layer_bytes(shape, trainer(), sparse=sparse).total
        assert layer_bytes(shape, trainer(4, tensor=4, sequence=True), sparse=sparse).total == pytest.approx(whole / 4)


def test_full_recompute_keeps_the_inputs_of_layers_and_one_layer():
    shape = shape_of("Qwen3-30B-A3B")
    full = trainer(megatron={"recompute_granularity": "full", "recompute_method": "uniform"})
    one = layer_bytes(shape, full, sparse=True)
    found = stage_activations(shape, full, range(48), 0, micro_batches=1)
    head = 2 * 2048 * 1000 * 2
    assert found == pytest.approx(48 * 2048 * 1000 * 2 + one.total + one.block + head)


@pytest.mark.parametrize("module", ["layernorm", "moe", "moe_act", "core_attn"])
def test_selective_recompute_keeps_less_by_as_much_as_its_module(module):
    shape = shape_of("Qwen3-30B-A3B")
    plain = stage_activations(shape, trainer(), range(48), 0, micro_batches=1)
    some = trainer(megatron={"recompute_granularity": "selective", "recompute_modules": [module]})
    layer = layer_bytes(shape, trainer(), sparse=True)
    part = {
        "layernorm": layer.norms,
        "moe": layer.router + layer.expert_inputs + layer.expert_gates + layer.expert_products,
        "moe_act": layer.expert_products,
        "core_attn": layer.statistics,
    }[module]
    # One layer's part comes back while its backward pass runs.
    assert plain - stage_activations(shape, some, range(48), 0, micro_batches=1) == pytest.approx(47 * part, abs=2)


def test_logits_and_their_gradient_are_those_of_a_micro_batch_in_bf16():
    shape = shape_of("Qwen3-30B-A3B")
    rows = 151936 // 4
    assert logits_bytes(shape, trainer(4, tensor=4, sequence=True)) == rows * (1000 * 4 + 100 * 8)


def test_a_token_costs_two_operations_a_parameter_and_attention_over_half_of_its_context():
    config = published_config("Qwen3-8B")
    family = family_of(config)
    parameters = model_parameters(family.weight_map(config), family.megatron_config(config))
    shape = shape_of("Qwen3-8B")
    assert parameters.active == parameters.total
    products = 2 * (parameters.total - 151936 * 4096)
    # Scores and their product with the values, 2 operations each, for 36 layers and 32 heads of 128, over L / 2 tokens.
    attention = 36 * 32 * (2 * 128 + 2 * 128) * 4096 / 2
    assert forward_flops_per_token(shape, parameters, 4096) == pytest.approx(products + attention)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mfu": 1.5}, "--mfu 1.5: must be at most 1"),
        ({"gpus_per_node": 0}, "--gpus-per-node 0: must be above 0"),
        ({"reserve_gib": 80.0}, "--reserve-gib 80.0: must be at least 0 and below"),
        ({"host_memory_gib": 0.0}, "--host-memory-gib 0.0: must be above 0"),
        ({"expert_load": 0.5}, "--expert-load 0.5: must be at least 1"),
    ],
)
def test_hardware_that_cannot_be_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Hardware(**settings)


DENSE_GQA = {"query_latent": 0, "kv_latent": 0, "rotary_columns": 0}


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        (
            "DeepSeek-V3",
            {
                "hidden": 7168, "heads": 128, "query_columns": 128 + 64, "value_columns": 128, "kv_heads": 128,
                "query_latent": 1536, "kv_latent": 512, "rotary_columns": 64, "qk_norm": False, "dense_columns": 18432,
                "expert_columns": 2048, "shared_columns": 2048, "experts": 256, "topk": 8,
                "sparse": (False,) * 3 + (True,) * 58, "vocab": 129280,
            },
        ),
        (
            "Moonlight-16B-A3B",
            {"heads": 16, "query_latent": 0, "kv_latent": 512, "shared_columns": 2 * 1408, "experts": 64, "topk": 6},
        ),
        (
            "GLM-4.5-Air",
            {
                "hidden": 4096, "heads": 96, "query_columns": 128, "value_columns": 128, "kv_heads": 8, **DENSE_GQA,
                "qk_norm": False, "dense_columns": 10944, "expert_columns": 1408, "shared_columns": 1408,
                "experts": 128, "topk": 8, "sparse": (False,) + (True,) * 45, "vocab": 151552,
            },
        ),
        ("GLM-4.5", {"qk_norm": True, "sparse": (False,) * 3 + (True,) * 89}),
        (
            "Qwen3-30B-A3B",
            {"qk_norm": True, "kv_heads": 4, "expert_columns": 768, "shared_columns": 0, "sparse": (True,) * 48},
        ),
        (
            "Qwen3-8B",
            {
                "qk_norm": True, "kv_heads": 8, **DENSE_GQA, "dense_columns": 12288, "expert_columns": 0, "experts": 0,
                "topk": 0, "sparse": (False,) * 36,
            },
        ),
        ("Llama-3-8B", {"qk_norm": False, "kv_heads": 8, "query_columns": 128, "layers": 32}),
    ],
)  # fmt: skip
def test_the_sizes_of_a_model_are_those_of_its_config(name, facts):
    shape = shape_of(name)
    assert {key: getattr(shape, key) for key in facts} == facts


def test_every_so_many_layers_have_experts():
    config = published_config("Qwen3-30B-A3B")
    model = family_of(config).megatron_config(config)
    sparse = replace(model, transformer={**model.transformer, "num_layers": 5, "moe_layer_freq": 2})
    assert Shape.of(sparse).sparse == (True, False, True, False, True)


def test_a_sparse_layer_with_latent_attention_keeps_what_its_table_says():
    shape, tokens = shape_of("DeepSeek-V3"), 1000
    hidden, heads, inner = 7168, 128, 2048
    latents = 2 * (1536 + 512) + 64
    projections = heads * (3 * 192 - 64 + 128)
    for settings, s, t, e, load, width in (
        ({}, 1, 1, 1, 1.0, 2),
        ({"precision": Precision.fp32}, 1, 1, 1, 1.0, 4),
        ({"tensor": 2, "sequence": True, "expert_tensor": 2}, 2, 2, 2, 1.5, 2),
        ({"tensor": 4}, 1, 4, 1, 1.0, 2),
    ):
        found = layer_bytes(shape, trainer(8, **settings), sparse=True, expert_load=load)
        columns = (4 * hidden + latents) / s + (projections + heads * 128 + 3 * inner) / t
        routed = 8 / s * e * load * (hidden + 3 * inner / e)
        in_float32 = heads / t + 3 * 256 / s
        assert found.total == pytest.approx(tokens * (width * (columns + routed) + 4 * in_float32))
        assert found.block == max(
            found.latents + found.projections + found.attention,
            found.expert_inputs + found.expert_gates + found.expert_products + found.shared,
        )
        # The first layers have an MLP in place of experts.
        dense = layer_bytes(shape, trainer(8, **settings), sparse=False, expert_load=load)
        assert dense.total == pytest.approx(tokens * (width * (columns + 3 * (18432 - inner) / t) + 4 * heads / t))


def test_recomputed_blocks_and_groups_of_layers_keep_their_inputs_alone():
    """Layers 1 to 8 of DeepSeek-V3, the first two of which are dense."""
    shape, layers = shape_of("DeepSeek-V3"), range(1, 9)
    dense, sparse = (layer_bytes(shape, trainer(), sparse=kind) for kind in (False, True))
    whole = [dense.total] * 2 + [sparse.total] * 6
    inputs = 7168 * 1000 * 2
    block = max(dense.block, sparse.block)

    def found(micro_batches=1, stage=0, **settings):
        megatron = {f"recompute_{name}": settings.pop(name) for name in list(settings) if name not in PIPELINES}
        given = trainer(8, megatron=megatron, **settings)
        return stage_activations(shape, given, layers, stage, micro_batches=micro_batches)

    two = {"pipeline": 2}
    assert found(**two) == pytest.approx(sum(whole) + block)
    assert found(**two, micro_batches=4) == pytest.approx(2 * sum(whole) + block)
    # The norm before the output layer is on the last stage.
    assert found(**two, stage=1, micro_batches=4) == pytest.approx(sum(whole) + block + 2 * inputs)
    full = {"granularity": "full", **two}
    for method, count, held, again in (
        ("uniform", 1, 8 * inputs, sparse.total),
        ("uniform", 3, 3 * inputs, 3 * sparse.total),
        ("uniform", 100, inputs, sum(whole)),
        ("block", 3, 3 * inputs + sum(whole[3:]), sparse.total),
        ("block", 100, 8 * inputs, sparse.total),
    ):
        largest = max(again, dense.total) if count == 1 or method == "block" else again
        assert found(**full, method=method, num_layers=count) == pytest.approx(held + largest + block)
    # One layer where no number is given; core attention where no modules are.
    assert found(**full, method="uniform") == pytest.approx(8 * inputs + max(whole) + block)
    statistics = 8 * 128 * 4 * 1000
    assert found(**two, granularity="selective") == pytest.approx(sum(whole) - statistics * 7 / 8 + block)
    # Two chunks of four layers, of which the first stage has 5 on the way with 8 micro-batches.
    interleaved = {"pipeline": 2, "virtual_pipeline": 2, "micro_batches": 8}
    assert found(**interleaved) == pytest.approx(sum(whole) * 5 / 2 + block)
    held = 2 * inputs + sum(whole[2:])
    assert found(**interleaved, granularity="full", method="block", num_layers=1) == pytest.approx(
        held * 5 / 2 + max(whole) + block
    )
    assert stage_activations(shape, trainer(), [], 0, micro_batches=1) == 0


PIPELINES = ("pipeline", "virtual_pipeline")


@pytest.mark.parametrize(
    ("module", "parts"),
    [
        ("mla_up_proj", ["projections"]),
        ("mlp", ["mlp"]),
        ("shared_experts", ["shared"]),
        ("moe", ["router", "expert_inputs", "expert_gates", "expert_products", "shared"]),
    ],
)
def test_a_recomputed_module_gives_up_its_own_parts_and_no_others(module, parts):
    for sparse in (True, False):
        layer = layer_bytes(shape_of("DeepSeek-V3"), trainer(), sparse=sparse)
        assert kept(layer, [module]) == replace(layer, **dict.fromkeys(parts, 0.0))


def test_logits_of_float32_stay_so_and_a_chunk_is_no_larger_than_its_micro_batch():
    given = trainer(3, tensor=3, sequence=True, precision=Precision.fp32, logprob_chunk_tokens=5000)
    rows = 50646  # a third of 151936, rounded up
    assert logits_bytes(shape_of("Qwen3-30B-A3B"), given) == rows * (1000 * 8 + 1000 * 8)


def test_states_follow_the_fields_that_make_them_wider_or_narrower():
    total = DENSE + EXPERTS
    narrow = {"grad_reduce_in_fp32": False}
    state = state_bytes(BIG, trainer(1, megatron=narrow))
    # The update makes a float32 copy of the gradients.
    assert (state.gradients, state.optimizer) == (2 * total, 16 * total)
    in_fp32 = state_bytes(BIG, trainer(1, megatron=narrow, precision=Precision.fp32))
    assert (in_fp32.gradients, in_fp32.optimizer) == (4 * total, 8 * total)
    aware = {"use_precision_aware_optimizer": True, "main_params_dtype": "float16", "exp_avg_dtype": "uint8"}
    assert state_bytes(BIG, trainer(1, megatron=aware)).optimizer == (2 + 1 + 4) * total
    assert state_bytes(BIG, trainer(1, megatron=aware, precision=Precision.fp32)).optimizer == (1 + 4) * total
    # A fraction means nothing unless offloading is on, and a dtype nothing without the optimizer that takes it.
    unused = {"optimizer_offload_fraction": 0.5, "exp_avg_dtype": "uint8"}
    state = state_bytes(BIG, trainer(1, megatron=unused))
    assert (state.optimizer, state.host) == (12 * total, 0)
    half = {**aware, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}
    state = state_bytes(BIG, trainer(1, megatron=half))
    assert (state.optimizer, state.host) == (7 * total / 2, (7 + 4) * total / 2)


def test_buffers_of_odd_sizes_are_padded_for_the_ranks_that_share_them():
    """One dense and one expert tensor of 100 elements on 6 ranks: 3 share the dense buffer, 2 the experts'."""
    small = (ChunkParameters(dense=(100,), experts=(100,)),)
    layout = {"tensor": 2, "sequence": True, "expert": 3}
    state = state_bytes(small, trainer(6, **layout))
    assert state.weights == 2 * (3 * 128 + 128)
    assert state.optimizer == 12 * (128 + 128 // 2)
    wide = state_bytes(small, trainer(6, **layout, megatron={"pad_buckets_for_high_nccl_busbw": True}))
    assert wide.gradients == 4 * (3 * 2**16 + 2**16)
    whole = state_bytes(small, trainer(6, **layout, distributed=False))
    assert (whole.weights, whole.optimizer) == (2 * 200, 12 * 200)
    both = state_bytes(small * 2, trainer(6, **layout))
    assert both.optimizer == 2 * state.optimizer


def table_of(name: str) -> ParameterTable:
    config = published_config(name)
    return ParameterTable(family_of(config).weight_map(config))


def test_a_tied_embedding_counts_on_the_first_and_on_the_last_stage_padded_for_its_ranks():
    hidden = 2560
    whole, cut = 2 * hidden + 2 * 128, hidden * 128 * (32 + 2 * 8 + 32) + 3 * hidden * 9728
    for tensor, rows in ((8, 151936 // 8), (7, 21706)):
        stages = table_of("Qwen3-4B").stages(ParallelConfig(tensor=tensor), [range(10), range(10, 35), [35]])
        layer = whole + cut // tensor
        assert [stage_total(stage) for stage in stages] == [
            10 * layer + rows * hidden, 25 * layer, layer + rows * hidden + hidden,
        ]  # fmt: skip


def test_a_stage_of_sparse_layers_has_its_share_of_the_experts_and_all_of_the_routers():
    hidden, layers = 2048, [range(24), range(24, 48)]
    parallel = ParallelConfig(tensor=4, expert=8, expert_tensor=2)
    first, last = table_of("Qwen3-30B-A3B").stages(parallel, layers)
    experts = 24 * 128 * 3 * hidden * 768 // 16
    layer = 2 * hidden + 2 * 128 + 128 * hidden + hidden * 128 * (32 + 2 * 4 + 32) // 4
    embedding = 151936 // 4 * hidden
    assert first == (ChunkParameters(dense=(24 * layer + embedding,), experts=(experts,)),)
    assert last == (ChunkParameters(dense=(24 * layer + embedding + hidden,), experts=(experts,)),)


def test_the_bias_that_chooses_experts_is_no_parameter():
    (stage,) = table_of("Moonlight-16B-A3B").stages(ParallelConfig(), [range(27)])
    assert stage_total(stage) == counted("Moonlight-16B-A3B")[0].total - 26 * 64


def test_modules_of_every_stage_have_as_many_parameters_as_the_table_says():
    """A toy of four layers, whose first layer is dense, in several layouts."""
    config = toy_config("glm4_moe", ToySize(layers=4, experts=2, hidden=32)) | {"vocab_size": 129}
    family = family_of(config)
    model, table = family.megatron_config(config), ParameterTable(family.weight_map(config))
    for layers, settings in (
        ([[0, 1], [2, 3]], {"tensor": 2, "sequence": True, "pipeline": 2, "expert": 2}),
        ([[0, 2], [1, 3]], {"pipeline": 2, "virtual_pipeline": 2}),
        (
            [[0, 1, 2], [3]],
            {"pipeline": 2, "megatron": {"num_layers_in_last_pipeline_stage": 1}, "fp8": Fp8Scaling.mxfp8},
        ),
    ):
        given = trainer(4, **settings)
        built = built_stages(given, model)
        assert [len(stage) for stage in built] == [settings.get("virtual_pipeline", 1)] * 2
        for stage, counts in zip(built, table.stages(given.parallel, layers), strict=True):
            for kind in ("dense", "experts"):
                assert sum(sum(getattr(chunk, kind)) for chunk in stage) == sum(getattr(counts[0], kind))


def test_the_last_stage_has_the_layers_for_multi_token_prediction_that_are_trained():
    config = toy_config("glm4_moe", ToySize(layers=4, experts=2, hidden=32, mtp_layers=2)) | {"vocab_size": 129}
    family = family_of(config)
    model, table = family.megatron_config(config), ParameterTable(family.weight_map(config, mtp=True))
    for layers, settings in (
        ([[0, 1], [2, 3]], {"tensor": 2, "sequence": True, "pipeline": 2, "expert": 2}),
        ([[0, 1, 2, 3]], {}),
    ):
        given = trainer(4, mtp=MtpConfig(train=True), **settings)
        built = built_stages(given, model)
        for stage, counts in zip(built, table.stages(given.parallel, layers), strict=True):
            for kind in ("dense", "experts"):
                assert sum(sum(getattr(chunk, kind)) for chunk in stage) == sum(getattr(counts[0], kind))
    plain = built_stages(trainer(1), model)[0]
    shapes = [spec.shape for spec in draft_specs(config, "bfloat16") if "e_score_correction_bias" not in spec.name]
    assert stage_total(built[0]) - stage_total(plain) == sum(map(prod, shapes))


def test_each_layer_for_multi_token_prediction_has_logits_of_its_own():
    shape = shape_of("Qwen3-30B-A3B")
    assert logits_bytes(shape, trainer(), mtp_layers=2) - logits_bytes(shape, trainer()) == 151936 * 1000 * 2 * 2


def test_layers_that_do_not_divide_over_stages_are_refused_by_setting():
    config = toy_config("qwen3_moe", ToySize(layers=3)) | {"vocab_size": 128}
    with pytest.raises(ValueError, match=r"trainer\.parallel: megatron-core refuses the layout"):
        built_stages(trainer(2, pipeline=2), family_of(config).megatron_config(config))
