"""Ranks of large layouts in one process: what they hold, and that nothing of them stays behind."""

import gc

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from slimrl.config.schema.trainer import ParallelConfig
from slimrl.models.family import family_of
from slimrl.models.hf_config import published_config
from slimrl.trainer.build import build_local_chunk
from slimrl.trainer.checkpointing.shard_schema import shard_schema
from slimrl.trainer.layout.fake_world import fake_world

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


def test_a_rank_of_a_thousand_holds_its_share_of_every_weight():
    config = published_config("Qwen3-30B-A3B")
    parallel = ParallelConfig(tensor=4, expert=8, expert_tensor=2, sequence=True)
    with fake_world(parallel, rank=777, world_size=1024):
        assert mpu.get_tensor_model_parallel_rank() == 777 % 4
        chunk = build_local_chunk(parallel, family_of(config).megatron_config(config), mtp=False)
        held = sum(parameter.numel() for parameter in chunk.parameters())
        assert {parameter.device.type for parameter in chunk.parameters()} == {"meta"}
    expected = 0
    for entry in family_of(config).weight_map(config).entries:
        whole = sum(torch.Size(tensor.shape).numel() for tensor in entry.hf)
        shard = entry.rule.shard
        parts = 1 if shard is None else 4 if shard.group == "tensor" else 2
        expected += whole / parts / (8 if entry.rule.num_experts else 1)
    assert held == expected


def test_nothing_of_a_fake_world_stays_behind():
    parallel = ParallelConfig(tensor=2, pipeline=2, sequence=True)
    state, device = torch.get_rng_state(), torch.cuda.current_device
    with fake_world(parallel, rank=3, world_size=4):
        assert dist.get_world_size() == 4
        torch.rand(3, device="cpu")
    assert not dist.is_initialized()
    assert not mpu.model_parallel_is_initialized()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.cuda.current_device is device
    assert torch.empty(1).device.type == "cpu"
    assert gc.isenabled()


def test_a_world_that_the_layout_does_not_divide_is_refused_and_leaves_nothing():
    with (
        pytest.raises(ValueError, match="6 ranks do not divide into the layout"),
        fake_world(ParallelConfig(tensor=4), rank=0, world_size=6),
    ):
        pass
    assert not dist.is_initialized()


def test_the_smallest_world_has_room_for_attention_and_for_experts():
    assert ParallelConfig().smallest_world() == 1
    assert ParallelConfig(tensor=4, pipeline=2, context=2).smallest_world() == 16
    assert ParallelConfig(tensor=4, expert=8, expert_tensor=1, pipeline=2).smallest_world() == 16
    assert ParallelConfig(tensor=4, expert=3, expert_tensor=2).smallest_world() == 12


@pytest.mark.parametrize("name", ["Qwen3-8B", "Moonlight-16B-A3B"])
def test_the_schema_covers_a_published_model_exactly_once_under_tensor_parallelism(name):
    config = published_config(name)
    schema = shard_schema(config, tensor=2, mtp=True)
    weights = sum(torch.Size(t.shape).numel() for entry in schema.weight_map.entries for t in entry.hf)
    assert sum(chunk.numel for chunk in schema.chunks) == weights
    assert {chunk.entry for chunk in schema.chunks} == set(range(len(schema.weight_map.entries)))
