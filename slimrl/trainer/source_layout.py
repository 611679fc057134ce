"""Which rank of a trainer holds which piece of every Hugging Face tensor, computed from the recipe alone.

Nothing is built and no process started: ranks are numbered by megatron-core's own generator, layers are divided over
pipeline stages by its own functions, and the weight map says how a tensor is cut. What MegatronWeightSource finds in a
running trainer is the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from megatron.core.parallel_state import RankGenerator
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from slimrl.config.model_rules import UNEVEN_PIPELINE_FIELDS
from slimrl.config.schema import ParallelConfig, Precision, TrainerConfig
from slimrl.data.protocols import SourcePiece, SourceTensor, TensorSpec
from slimrl.models.family import family_of
from slimrl.models.weight_map import Entry
from slimrl.trainer.build import padded_vocab, transformer_config

RANK_ORDER = "tp-cp-ep-dp-pp"
"""From the fastest to the slowest; the default of megatron-core's initialize_model_parallel."""

Ranks = tuple[int, ...]
T = TypeVar("T")


def source_layout(hf_config: dict[str, Any], trainer: TrainerConfig) -> list[SourceTensor]:
    """Every tensor that a resync sends, in export order, with the ranks that hold each of its pieces.

    Raises:
        ValueError: the model is not supported, or does not divide into the layout.
    """
    _check_world(trainer)
    family = family_of(hf_config)
    model = family.megatron_config(hf_config)
    weight_map = family.weight_map(hf_config, padded_vocab(model.vocab_size, trainer.parallel.tensor))
    uneven = {name: value for name, value in trainer.megatron.items() if name in UNEVEN_PIPELINE_FIELDS}
    stages = layers_of_stages(transformer_config(replace(trainer, megatron=uneven), model))
    num_experts = int(model.transformer.get("num_moe_experts") or 0)
    places = _Places(trainer.parallel, trainer.num_ranks, stages, num_experts)
    dtype = "bfloat16" if trainer.precision is Precision.bf16 else "float32"
    tensors: list[SourceTensor] = []
    for entry in weight_map.entries:
        holders = places.of(entry)
        for tensor in entry.hf:
            regions = [entry.slices(tensor, shard, len(holders))[0] for shard in range(len(holders))]
            # A shard may consist of padding alone.
            pieces = tuple(
                SourcePiece(region=region, holders=ranks)
                for region, ranks in zip(regions, holders, strict=True)
                if all(part.start < part.stop for part in region)
            )
            for name in tensor.names:
                spec = TensorSpec(name=name, shape=tensor.shape, dtype=tensor.dtype or dtype, atomic=entry.atomic)
                tensors.append(SourceTensor(spec=spec, pieces=pieces))
    return tensors


def _check_world(trainer: TrainerConfig) -> None:
    parallel = trainer.parallel
    for sizes in (parallel.tensor * parallel.context, parallel.expert_tensor * parallel.expert):
        if trainer.num_ranks % (sizes * parallel.pipeline):
            raise ValueError(f"trainer.num_ranks: {trainer.num_ranks} do not divide into the layout {parallel}")


def layers_of_stages(config: TransformerConfig) -> list[list[int]]:
    """The layers that each pipeline rank holds, over all of its virtual stages, counted from 0.

    Raises:
        ValueError: the layers do not divide so.
    """
    interleaved = config.virtual_pipeline_model_parallel_size
    stages: list[list[int]] = [[] for _ in range(config.pipeline_model_parallel_size)]
    first = 0
    try:
        for chunk in range(interleaved or 1):
            for rank, held in enumerate(stages):
                if config.pipeline_model_parallel_layout is not None:
                    count = config.pipeline_model_parallel_layout.layout[rank][chunk].count(LayerType.decoder)
                else:
                    virtual = chunk if interleaved else None
                    count = get_num_layers_to_build(config, virtual, rank)
                    first = get_transformer_layer_offset(config, virtual, rank)
                held += range(first, first + count)
                first += count
    except AssertionError as error:
        raise ValueError(f"trainer.parallel.pipeline: {error}") from error
    if sorted(layer for held in stages for layer in held) != list(range(config.num_layers)):
        raise ValueError(f"trainer.parallel.pipeline: the stages do not hold {config.num_layers} layers once each")
    return stages


@dataclass(frozen=True)
class _Places:
    """Ranks by what they hold."""

    parallel: ParallelConfig
    num_ranks: int
    stages: list[list[int]]
    """Layers by pipeline rank."""
    num_experts: int

    def of(self, entry: Entry) -> Sequence[Ranks]:
        """The ranks that hold each shard of an entry, ascending; several stages may hold the same."""
        first, *others = (self._on_stage(entry, stage) for stage in self._stages_of(entry))
        for other in others:
            first = [tuple(sorted({*a, *b})) for a, b in zip(first, other, strict=True)]
        return first

    def _on_stage(self, entry: Entry, stage: int) -> Sequence[Ranks]:
        if entry.expert is None:
            return self._dense[stage] if entry.rule.shard else [self._whole[stage]]
        assert entry.rule.shard is not None, f"{entry.megatron[0]}: experts that are not cut"
        return self._experts[stage][entry.expert * self.parallel.expert // self.num_experts]

    def _stages_of(self, entry: Entry) -> list[int]:
        """The embedding is on the first stage, all else outside of layers on the last; a tied embedding is on both."""
        if entry.layer is not None:
            return [self._stage_of_layer[entry.layer]]
        last = self.parallel.pipeline - 1
        return sorted({0 if name.startswith("embedding.") else last for name in entry.megatron})

    @cached_property
    def _stage_of_layer(self) -> dict[int, int]:
        return {layer: stage for stage, layers in enumerate(self.stages) for layer in layers}

    @cached_property
    def _whole(self) -> list[Ranks]:
        """By stage: all of its ranks."""
        return _groups(self._dense_ranks, "tp-cp-dp")

    @cached_property
    def _dense(self) -> list[list[Ranks]]:
        """By stage and tensor-parallel rank."""
        return _cut(_groups(self._dense_ranks, "cp-dp"), self.parallel.tensor)

    @cached_property
    def _experts(self) -> list[list[list[Ranks]]]:
        """By stage, expert-parallel rank and tensor-parallel rank of an expert."""
        parallel = self.parallel
        sizes = parallel.expert_tensor * parallel.expert
        ranks = RankGenerator(
            tp=parallel.expert_tensor,
            ep=parallel.expert,
            dp=self.num_ranks // (sizes * parallel.pipeline),
            pp=parallel.pipeline,
            cp=1,
            order=RANK_ORDER,
        )
        return _cut(_cut(_groups(ranks, "dp"), parallel.expert_tensor), parallel.expert)

    @cached_property
    def _dense_ranks(self) -> RankGenerator:
        parallel = self.parallel
        sizes = parallel.tensor * parallel.context * parallel.pipeline
        return RankGenerator(
            tp=parallel.tensor,
            ep=1,
            dp=self.num_ranks // sizes,
            pp=parallel.pipeline,
            cp=parallel.context,
            order=RANK_ORDER,
        )


def _groups(ranks: RankGenerator, together: str) -> list[Ranks]:
    """Ranks that differ in these kinds of parallelism alone; groups in the order of the other kinds, fastest first."""
    return [tuple(sorted(group)) for group in ranks.get_ranks(together)]


def _cut(items: list[T], size: int) -> list[list[T]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
