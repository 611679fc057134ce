"""What the planner counts against what ranks of a running trainer hold."""

from dataclasses import replace

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from ranks import run_ranks
from trainer_cases import LAYERS, VOCAB, Run, in_layouts, model_config, start, trainer_config

from slimrl.config.schema.precision import Precision
from slimrl.config.schema.trainer import OptimizerConfig
from slimrl.estimates.planner.activations import layer_bytes
from slimrl.estimates.planner.model_state import state_bytes
from slimrl.estimates.planner.parameters import ParameterTable, built_stages, stage_total
from slimrl.estimates.planner.shape import Shape
from slimrl.models.family import family_of
from slimrl.models.hf_config import published_config
from slimrl.trainer.build import build_model, transformer_config
from slimrl.trainer.layout.parallel import destroy_parallel
from slimrl.trainer.layout.source_layout import layers_of_stages

pytestmark = [pytest.mark.integration, pytest.mark.timeout(200)]

BF16, FP32 = Precision.bf16, Precision.fp32
PLAIN = OptimizerConfig(lr=1e-3, distributed=False)
CASES = {
    2: [{"expert": 2, "precision": BF16}, {"pipeline": 2, "precision": FP32}, {"optimizer": PLAIN, "precision": BF16}],
    4: [
        {"tensor": 2, "sequence": True, "expert": 4, "precision": BF16},
        {"pipeline": 2, "virtual_pipeline": 2, "expert": 2, "precision": BF16},
        {"tensor": 2, "sequence": True, "pipeline": 2, "expert_tensor": 2, "precision": FP32},
        {"context": 2, "expert": 2, "precision": BF16, "megatron": {"grad_reduce_in_fp32": False}},
    ],
}
"""Layouts by number of ranks."""


def held_bytes(run: Run) -> tuple[int, int, int]:
    """Bytes that weights, gradients and the optimizer's own tensors really take."""
    weights = {p.untyped_storage()._cdata: p.untyped_storage() for chunk in run.chunks for p in chunk.parameters()}
    buffers = [buffer for chunk in run.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    gradients = sum(buffer.grad_data.untyped_storage().nbytes() for buffer in buffers)
    own = {}
    for tensor in run.optimizer.tensors():
        storage = tensor.untyped_storage()
        if storage._cdata not in weights and tensor.numel() > 1:
            own[storage._cdata] = storage.nbytes()
    return sum(storage.nbytes() for storage in weights.values()), gradients, sum(own.values())


def hold(rank, num_ranks, port, cases):
    """For each case: pipeline rank, parameters, bytes held."""
    results = []
    for run in in_layouts(rank, num_ranks, port, cases, None):
        run.optimizer.create_state()
        parameters = sum(p.numel() for chunk in run.chunks for p in chunk.parameters())
        results.append((run.layout.pipeline_rank, parameters, held_bytes(run)))
    return results


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_planned_ranks_hold_what_running_ones_hold(num_ranks):
    found = run_ranks(hold, num_ranks, CASES[num_ranks], timeout_s=150)
    for case, settings in enumerate(CASES[num_ranks]):
        trainer = trainer_config(num_ranks, **settings)
        stages = built_stages(trainer, model_config())
        owned: dict[int, list[int]] = {}
        for by_case in found:
            stage, parameters, (weights, gradients, optimizer) = by_case[case]
            planned = state_bytes(stages[stage], trainer)
            assert parameters == stage_total(stages[stage]), settings
            assert (weights, gradients) == (planned.weights, planned.gradients), settings
            owned.setdefault(stage, []).append(optimizer)
        for stage, held in owned.items():
            planned = state_bytes(stages[stage], trainer).optimizer
            scratch = 0 if trainer.megatron.get("grad_reduce_in_fp32", True) else planned / 4
            # A share is planned with the padding of its buffer, 63 elements a parameter at most.
            assert planned - scratch >= max(held), settings
            assert planned - scratch == pytest.approx(max(held), rel=0.1), settings


WIDE = {
    "hidden_size": 256,
    "ffn_hidden_size": 512,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "kv_channels": 32,
    "moe_ffn_hidden_size": 128,
}
"""Wide enough for weights and tokens to outweigh what is kept once a layer."""


def kept_bytes(rank, num_ranks, port, model, tokens):
    """Bytes of distinct storages, weights left out, that the forward pass of so many tokens keeps."""
    trainer = trainer_config(max_tokens_per_rank=tokens)
    start(trainer, rank, num_ranks, port)
    (chunk,) = build_model(trainer, model)
    weights = {parameter.untyped_storage()._cdata for parameter in chunk.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            # Holding the storage keeps its place from being given to another.
            kept[storage._cdata] = storage
        return tensor

    positions_1T = torch.arange(tokens)[None]
    ends = torch.tensor([0, tokens], dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=tokens, max_seqlen_kv=tokens
    )
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = chunk(positions_1T % VOCAB, positions_1T, None, packed_seq_params=packed)
    assert logits.requires_grad
    destroy_parallel()
    return sum(storage.nbytes() for storage in kept.values())


def wide_model(**more):
    facts = {**model_config().transformer, **WIDE, **more}
    if not facts["num_moe_experts"]:
        facts = {name: value for name, value in facts.items() if "moe" not in name}
    return replace(model_config(), transformer=facts)


@pytest.mark.parametrize("experts", [8, None])
def test_a_forward_pass_keeps_what_is_planned_and_what_unfused_layers_add(experts):
    """Megatron's own layers, which a CPU has, also keep results within norms and gates, and copies of shared heads."""
    model = wide_model(num_moe_experts=experts)
    planned = layer_bytes(Shape.of(model), trainer_config(max_tokens_per_rank=512), sparse=bool(experts)).total
    (measured,) = run_ranks(kept_bytes, 1, model, 512, timeout_s=60)
    assert 1.0 < measured / (LAYERS * planned) < 1.8


def test_what_is_kept_grows_with_the_width_of_mlps_as_planned_and_two_tensors_more():
    tokens, growth = 512, 256
    trainer = trainer_config(max_tokens_per_rank=tokens)
    planned, measured = [], []
    for width in (512, 512 + growth):
        model = wide_model(num_moe_experts=None, ffn_hidden_size=width)
        planned.append(LAYERS * layer_bytes(Shape.of(model), trainer, sparse=False).total)
        measured += run_ranks(kept_bytes, 1, model, tokens, timeout_s=60)
    one_tensor = LAYERS * tokens * growth * 4
    assert planned[1] - planned[0] == 3 * one_tensor
    assert measured[1] - measured[0] == (3 + 2) * one_tensor


@pytest.mark.parametrize(
    ("name", "layout", "num_ranks"),
    [
        ("Qwen3-30B-A3B", {"tensor": 4, "sequence": True, "expert": 16, "pipeline": 2}, 32),
        ("Moonlight-16B-A3B", {"tensor": 2, "sequence": True, "expert": 4, "expert_tensor": 2, "pipeline": 3}, 24),
        ("Qwen3-4B", {"tensor": 4, "pipeline": 2}, 8),
    ],
)
def test_the_table_of_weights_counts_what_is_built(name, layout, num_ranks):
    config = published_config(name)
    family = family_of(config)
    model = family.megatron_config(config)
    trainer = trainer_config(num_ranks, **layout)
    layers = layers_of_stages(transformer_config(trainer, model))
    counted = ParameterTable(family.weight_map(config)).stages(trainer.parallel, layers)
    assert [stage_total(stage) for stage in counted] == [stage_total(s) for s in built_stages(trainer, model)]
