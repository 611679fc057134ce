"""The layout of the trainer's weights as computed from a recipe, against modules that are really built."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shard_shapes import shard_shape
from transformers import AutoConfig

from slimrl.config.schema.precision import Precision
from slimrl.config.schema.trainer import OptimizerConfig, ParallelConfig, TrainerConfig
from slimrl.data.model_weights import SourceLayout
from slimrl.models.draft import draft_specs
from slimrl.models.family import family_of
from slimrl.models.weight_map import WeightMap
from slimrl.trainer.build import build_local_chunk, padded_vocab
from slimrl.trainer.layout.fake_world import fake_world
from slimrl.trainer.layout.source_layout import source_layout
from slimrl.trainer.weight_source import MegatronWeightSource
from slimrl.trainer.weights import local_weights, shard_place
from tests.integration.ranks import run_ranks
from tests.integration.small_models import CONFIGS, small_model
from tests.integration.weight_cases import change_layout, join, loaded_chunks

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

FAKE: dict[str, tuple[str, int, ParallelConfig, dict[str, Any]]] = {
    "tp2_pp2_vpp2_ep2": (
        "qwen3_moe",
        8,
        ParallelConfig(tensor=2, sequence=True, pipeline=2, virtual_pipeline=2, expert=2),
        {},
    ),
    "tp4_ep2_etp2": ("deepseek_v3", 8, ParallelConfig(tensor=4, sequence=True, expert=2, expert_tensor=2), {}),
    "ep2_etp4": ("glm4_moe", 8, ParallelConfig(expert=2, expert_tensor=4), {}),
    "cp2_ep4_pp2": ("qwen3_moe_mixed", 16, ParallelConfig(context=2, expert=4, pipeline=2), {}),
    "delta_nets_tp2_cp2": (
        "qwen3_next_mixed",
        8,
        ParallelConfig(tensor=2, sequence=True, context=2, expert=4),
        {},
    ),
    "delta_nets_in_four_tensors_tp2_cp2": (
        "qwen3_5_mixed",
        4,
        ParallelConfig(tensor=2, sequence=True, context=2),
        {},
    ),
    "tied_tp2_pp4": ("qwen3_tied", 16, ParallelConfig(tensor=2, sequence=True, pipeline=4), {}),
    "first_stage_of_1": (
        "qwen3",
        6,
        ParallelConfig(pipeline=2),
        {"num_layers_in_first_pipeline_stage": 1},
    ),
    "pp2_vpp2_by_layout": (
        "deepseek_v3",
        4,
        ParallelConfig(pipeline=2, virtual_pipeline=2, expert=2),
        {"pipeline_model_parallel_layout": "Et|t|tt|L"},
    ),
    "pp3_with_embedding_and_loss_counted": (
        "qwen3",
        3,
        ParallelConfig(pipeline=3),
        {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
    ),
}
"""Model of CONFIGS, number of ranks, layout, further fields of `trainer.megatron`."""

LIVE = {
    "tp2_pp2_vpp2_ep2": ParallelConfig(tensor=2, sequence=True, pipeline=2, virtual_pipeline=2, expert=2),
    "tp2_ep2_etp2": ParallelConfig(tensor=2, sequence=True, expert=2, expert_tensor=2),
    "cp2_pp2": ParallelConfig(context=2, pipeline=2),
}


def full_config(name: str) -> dict[str, Any]:
    """With the defaults that transformers writes into config.json."""
    return AutoConfig.for_model(**CONFIGS[name]).to_dict()


def trainer_config(parallel: ParallelConfig, num_ranks: int, megatron: dict[str, Any] | None = None) -> TrainerConfig:
    return TrainerConfig(
        num_ranks=num_ranks,
        parallel=parallel,
        precision=Precision.bf16,
        max_tokens_per_rank=64,
        optimizer=OptimizerConfig(lr=0.0),
        megatron=megatron or {},
    )


def built_holders(
    hf_config: dict[str, Any],
    weight_map: WeightMap,
    parallel: ParallelConfig,
    num_ranks: int,
    megatron: dict[str, Any],
    *,
    mtp: bool = False,
) -> dict[tuple[str, str], tuple[int, ...]]:
    """Ranks by (Hugging Face name, block), of every rank's modules on the meta device."""
    holders: dict[tuple[str, str], set[int]] = defaultdict(set)
    model = family_of(hf_config).megatron_config(hf_config)
    for rank in range(num_ranks):
        with fake_world(parallel, rank=rank, world_size=num_ranks):
            chunks = [
                build_local_chunk(parallel, model, mtp=mtp, index=index, megatron=megatron)
                for index in range(parallel.virtual_pipeline or 1)
            ]
            for index, weight in local_weights(chunks, weight_map):
                entry = weight_map.entries[index]
                shard, count = shard_place(entry)
                assert tuple(weight.shape) == shard_shape(entry, count)
                for tensor in entry.hf:
                    for block in entry.blocks(tensor, shard, count)[0]:
                        holders[tensor.name, str(block)].add(rank)
    return {key: tuple(sorted(ranks)) for key, ranks in holders.items()}


def as_holders(layout: SourceLayout) -> dict[tuple[str, str], tuple[int, ...]]:
    return {(spec.name, str(piece.region)): piece.holders for spec, pieces in layout.items() for piece in pieces}


@pytest.mark.parametrize("case", FAKE)
def test_every_rank_holds_what_its_modules_have_when_they_are_built(case):
    name, num_ranks, parallel, megatron = FAKE[case]
    hf_config = full_config(name)
    family = family_of(hf_config)
    vocab = padded_vocab(family.megatron_config(hf_config).vocab_size, parallel.tensor)
    weight_map = family.weight_map(hf_config, vocab)
    layout = source_layout(hf_config, trainer_config(parallel, num_ranks, megatron))
    assert as_holders(layout) == built_holders(hf_config, weight_map, parallel, num_ranks, megatron)
    assert list(layout) == weight_map.specs("bfloat16")
    for spec, pieces in layout.items():
        sizes = [torch.Size(part.stop - part.start for part in piece.region).numel() for piece in pieces]
        assert sum(sizes) == torch.Size(spec.shape).numel()


def test_layers_that_engines_draft_with_are_on_the_last_stage_beside_the_embedding():
    hf_config = full_config("glm4_moe") | {"num_nextn_predict_layers": 1}
    parallel, family = ParallelConfig(tensor=2, sequence=True, pipeline=2, expert=2), family_of(hf_config)
    vocab = padded_vocab(family.megatron_config(hf_config).vocab_size, parallel.tensor)
    weight_map = family.weight_map(hf_config, vocab, mtp=True).without_copies()
    layout = source_layout(hf_config, trainer_config(parallel, 8), mtp=True)
    assert as_holders(layout) == built_holders(hf_config, weight_map, parallel, 8, {}, mtp=True)
    assert [spec for spec in layout if spec.mtp] == draft_specs(hf_config, "bfloat16")


def live_layouts(rank: int, num_ranks: int, port: int, path: Path) -> dict[str, SourceLayout]:
    join(rank, num_ranks, port)
    found = {}
    for name, parallel in LIVE.items():
        change_layout(parallel)
        chunks, family, hf_config = loaded_chunks(path, parallel)
        found[name] = MegatronWeightSource(chunks, family, hf_config, "bfloat16").layout()
    dist.destroy_process_group()
    return found


@pytest.mark.full
def test_a_running_trainer_finds_the_same_layout(tmp_path):
    path = small_model("qwen3_moe", tmp_path / "model")
    by_rank = run_ranks(live_layouts, 4, path)
    for name, parallel in LIVE.items():
        expected = source_layout(full_config("qwen3_moe"), trainer_config(parallel, 4))
        assert all(list(layouts[name].items()) == list(expected.items()) for layouts in by_rank)
