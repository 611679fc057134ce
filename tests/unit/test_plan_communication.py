"""What ranks of a planned layout send to each other, against counts of collectives by hand."""

from dataclasses import replace

import pytest

from slimrl.config.schema.precision import Precision
from slimrl.config.schema.trainer import OptimizerConfig, ParallelConfig, TrainerConfig
from slimrl.estimates.planner.communication import Communication, logprob_communication, update_communication
from slimrl.estimates.planner.hardware import Hardware
from slimrl.estimates.planner.parameters import ChunkParameters
from slimrl.estimates.planner.schedule import Batch
from slimrl.estimates.planner.shape import Shape
from slimrl.estimates.resync.machine import Machine
from slimrl.models.family import family_of
from slimrl.models.hf_config import published_config

NVLINK, NETWORK = 400e9, 50e9
HARDWARE = Hardware(gpus_per_node=8, links=Machine(nvlink_gb_per_s=400, network_gb_per_s=50))
TOKENS = 1000
BATCH = Batch(tokens=8000, trajectory_tokens=1000, micro_batches=5)
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
DENSE, EXPERTS = 10**6, 3 * 10**6


def shape_of(name: str) -> Shape:
    config = published_config(name)
    return Shape.of(family_of(config).megatron_config(config))


def trainer(num_ranks: int, *, megatron: dict | None = None, **parallel) -> TrainerConfig:
    return TrainerConfig(
        num_ranks=num_ranks,
        parallel=ParallelConfig(**parallel),
        optimizer=OptimizerConfig(lr=1e-6),
        precision=Precision.bf16,
        max_tokens_per_rank=TOKENS,
        megatron=megatron or {},
    )


def sent(name: str, config: TrainerConfig) -> tuple[Communication, Communication]:
    """Communication of an update and of log-probs, with stages of equally many layers."""
    shape = shape_of(name)
    each = shape.layers // config.parallel.pipeline
    layers = [list(range(stage * each, (stage + 1) * each)) for stage in range(config.parallel.pipeline)]
    stages = [(ChunkParameters(dense=(DENSE,), experts=(EXPERTS,)),)] * config.parallel.pipeline
    return (
        update_communication(shape, config, stages, layers, BATCH, HARDWARE),
        logprob_communication(shape, config, layers, BATCH, HARDWARE),
    )


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        # Attention and MLP of each layer.
        ("Qwen3-8B", 36 * 2),
        # Attention alone: routed experts gather no tokens over tensor-parallel ranks.
        ("Qwen3-30B-A3B", 48),
        # The first layer has an MLP, the other 45 have a shared expert.
        ("GLM-4.5-Air", 46 * 2),
    ],
)
def test_tensor_parallel_ranks_gather_and_scatter_about_attention_mlps_and_shared_experts(name, blocks):
    residual = TOKENS * shape_of(name).hidden * 2
    ring = residual * 3 / 4 / NVLINK
    update, logprobs = sent(name, trainer(4, tensor=4, sequence=True))
    assert logprobs.tensor_s == pytest.approx(5 * blocks * 2 * ring)
    assert update.tensor_s == pytest.approx(2 * logprobs.tensor_s)
    full, _ = sent(name, trainer(4, tensor=4, sequence=True, megatron=FULL))
    assert full.tensor_s == pytest.approx(3 * logprobs.tensor_s)


def test_keys_and_values_pass_round_the_context_ring_once_forward_and_with_their_gradients_backward():
    keys = 4 * 2 * 128 * TOKENS * 2
    update, logprobs = sent("Qwen3-30B-A3B", trainer(4, context=4))
    assert logprobs.context_s == pytest.approx(5 * 48 * 3 * keys / NVLINK)
    assert update.context_s == pytest.approx(3 * logprobs.context_s)


def test_a_delta_net_exchanges_heads_of_its_tokens_for_tokens_of_its_heads_and_back_each_way():
    # Queries, keys, values, gates, steps and decays there, results back; 12 of 48 layers have attention.
    swapped = (2 * 16 * 128 + 2 * 32 * 128 + 2 * 32 + 32 * 128) / 2 * TOKENS * 2 * 3 / 4
    keys = 2 * 2 * 256 / 2 * TOKENS * 2 * 3
    update, logprobs = sent("Qwen3-Next-80B-A3B", trainer(8, tensor=2, sequence=True, context=4))
    assert logprobs.context_s == pytest.approx(5 * (36 * swapped + 12 * keys) / NVLINK)
    assert update.context_s == pytest.approx(5 * (2 * 36 * swapped + 3 * 12 * keys) / NVLINK)
    assert sent("Qwen3-Next-80B-A3B", trainer(8))[0].context_s == 0


def test_tokens_go_to_their_experts_and_come_back():
    routed = TOKENS * 2048 * 2 * 8
    update, logprobs = sent("Qwen3-30B-A3B", trainer(16, expert=16))
    assert logprobs.expert_s == pytest.approx(5 * 48 * 2 * routed * 15 / 16 / NETWORK)
    assert update.expert_s == pytest.approx(2 * logprobs.expert_s)
    # With tensor parallelism a rank has a share of the tokens.
    cut, _ = sent("Qwen3-30B-A3B", trainer(16, expert=16, tensor=4, sequence=True))
    assert cut.expert_s == pytest.approx(update.expert_s / 4)


def test_stages_of_one_node_use_its_links_and_log_probs_go_one_way():
    residual = TOKENS * 2048 * 2
    near, logprobs = sent("Qwen3-30B-A3B", trainer(8, pipeline=4))
    assert near.pipeline_s == pytest.approx(5 * 2 * residual / NVLINK)
    assert logprobs.pipeline_s == pytest.approx(near.pipeline_s / 2)
    far, _ = sent("Qwen3-30B-A3B", trainer(16, pipeline=4))
    assert far.pipeline_s == pytest.approx(8 * near.pipeline_s)
    # Computing activations again sends nothing between stages.
    assert sent("Qwen3-30B-A3B", trainer(8, pipeline=4, megatron=FULL))[0].pipeline_s == near.pipeline_s


def test_gradients_are_reduced_as_wide_as_they_are_kept_and_log_probs_have_none():
    update, logprobs = sent("Qwen3-30B-A3B", trainer(8, expert=4))
    dense, experts = DENSE * 7 / 8 / NVLINK, EXPERTS / 2 / NVLINK
    assert update.data_s == pytest.approx((4 + 2) * (dense + experts))
    assert logprobs.data_s == 0
    narrow, _ = sent("Qwen3-30B-A3B", trainer(8, expert=4, megatron={"grad_reduce_in_fp32": False}))
    assert narrow.data_s == pytest.approx((2 + 2) * (dense + experts))
    assert replace(narrow, data_s=update.data_s) == update


def test_an_interleaved_pipeline_hands_over_between_all_its_chunks_and_a_single_stage_not_at_all():
    plain, _ = sent("Qwen3-30B-A3B", trainer(8, pipeline=4))
    interleaved, _ = sent("Qwen3-30B-A3B", trainer(8, pipeline=4, virtual_pipeline=3))
    assert interleaved.pipeline_s == pytest.approx(3 * plain.pipeline_s)
    for virtual in (None, 2):
        alone, logprobs = sent("Qwen3-30B-A3B", trainer(8, virtual_pipeline=virtual))
        assert alone.pipeline_s == logprobs.pipeline_s == 0
    # With sequence parallelism each tensor-parallel rank hands over its share, without it the whole.
    cut, _ = sent("Qwen3-30B-A3B", trainer(8, pipeline=4, tensor=2, sequence=True))
    assert cut.pipeline_s == pytest.approx(plain.pipeline_s / 2)
    assert sent("Qwen3-8B", trainer(8, pipeline=4, tensor=2))[0].pipeline_s == pytest.approx(2 * plain.pipeline_s)


def test_experts_that_are_cut_gather_their_tokens_and_scatter_their_results():
    routed = TOKENS / 2 * 2048 * 2 * 8
    layout = {"tensor": 2, "sequence": True, "expert": 4, "expert_tensor": 2}
    _, logprobs = sent("Qwen3-30B-A3B", trainer(8, **layout))
    near = routed * 3 / 4 / NVLINK + 2 * routed / 2 / NVLINK
    assert logprobs.expert_s == pytest.approx(5 * 48 * 2 * near)
    # The ranks of 8 experts and 2 cuts are two nodes, those of a cut neighbours.
    _, logprobs = sent("Qwen3-30B-A3B", trainer(16, **{**layout, "expert": 8}))
    far = routed * 7 / 8 / NETWORK + 2 * routed / 2 / NVLINK
    assert logprobs.expert_s == pytest.approx(5 * 48 * 2 * far)


def test_a_busier_expert_rank_sends_more_and_wider_numbers_take_longer():
    layout = {"tensor": 2, "sequence": True, "context": 2, "pipeline": 2, "expert": 4}
    plain, _ = sent("Qwen3-30B-A3B", trainer(8, **layout))
    assert min(vars(plain).values()) > 0
    wide, _ = sent("Qwen3-30B-A3B", replace(trainer(8, **layout), precision=Precision.fp32))
    # Gradients are in float32 either way, weights are not.
    assert wide.data_s == pytest.approx(plain.data_s * 8 / 6)
    assert replace(wide, data_s=0).total_s == pytest.approx(2 * replace(plain, data_s=0).total_s)
    shape, config = shape_of("Qwen3-30B-A3B"), trainer(8, **layout)
    layers = [list(range(24)), list(range(24, 48))]
    busy = logprob_communication(shape, config, layers, BATCH, replace(HARDWARE, expert_load=1.5))
    even = logprob_communication(shape, config, layers, BATCH, HARDWARE)
    assert busy == replace(even, expert_s=pytest.approx(1.5 * even.expert_s))


def test_groups_that_do_not_fit_into_a_node_use_the_network():
    keys = 4 * 2 * 128 / 4 * TOKENS * 2
    wide, _ = sent("Qwen3-30B-A3B", trainer(16, tensor=4, sequence=True, context=4))
    assert wide.context_s == pytest.approx(5 * 48 * 3 * 3 * keys / NETWORK)
    assert wide.data_s == pytest.approx(6 * (DENSE * 3 / 4 + EXPERTS * 15 / 16) / NETWORK)
    # 8 ranks of one stage are one node.
    near, _ = sent("Qwen3-30B-A3B", trainer(16, pipeline=2, tensor=2, sequence=True, expert=2))
    assert near.data_s == pytest.approx(6 * (DENSE + EXPERTS) * 3 / 4 / NVLINK)
    far, _ = sent("Qwen3-30B-A3B", trainer(16, tensor=16, sequence=True))
    assert far.tensor_s == pytest.approx(5 * 48 * 4 * TOKENS * 2048 * 2 * 15 / 16 / NETWORK)


def test_of_each_kind_the_busiest_stage_counts():
    """The first stage has the dense layers and the fewest parameters, the second one most layers."""
    shape, config = shape_of("DeepSeek-V3"), trainer(8, pipeline=2, tensor=2, sequence=True, context=2, expert=2)
    stages = [(ChunkParameters(dense=(n, n), experts=(3 * n,)),) * 2 for n in (10**5, 10**6)]
    layers = [list(range(6)), list(range(6, 13))]
    update = update_communication(shape, config, stages, layers, BATCH, HARDWARE)
    residual = TOKENS * 7168 * 2
    assert update.tensor_s == pytest.approx(5 * 4 * 7 * 2 * residual / 2 / NVLINK)
    assert update.context_s == pytest.approx(5 * 3 * 7 * 128 * (192 + 128) / 2 * TOKENS * 2 / NVLINK)
    assert update.expert_s == pytest.approx(5 * 4 * 7 * residual / 2 * 8 / 2 / NVLINK)
    assert update.data_s == pytest.approx(6 * (4 * 10**6 / 2 + 6 * 10**6 / 2) / NVLINK)
