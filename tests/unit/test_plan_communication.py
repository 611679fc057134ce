"""What ranks of a planned layout send to each other, against counts of collectives by hand."""

from dataclasses import replace

import pytest

from slimrl.config.schema import OptimizerConfig, ParallelConfig, Precision, TrainerConfig
from slimrl.models.family import family_of
from slimrl.models.hf_config import published_config
from slimrl.planner.communication import Communication, logprob_communication, update_communication
from slimrl.planner.hardware import Hardware
from slimrl.planner.parameters import ChunkParameters
from slimrl.planner.schedule import Batch
from slimrl.planner.shape import Shape
from slimrl.resync.estimate.machine import Machine

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
    """Of an update and of log-probs, with stages of equally many layers."""
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
