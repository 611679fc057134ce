"""The ranks that hold each piece of every Hugging Face tensor, computed from the recipe alone.

No model is built and no process started: megatron-core numbers the ranks and assigns layers to pipeline
stages, and the weight map says how a tensor is sharded. MegatronWeightSource finds the same in a running trainer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import batched
from typing import Any

from megatron.core.parallel_state import RankGenerator
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from slimrl.config.model_rules import UNEVEN_PIPELINE_FIELDS
from slimrl.config.schema.precision import Fp8Scaling
from slimrl.config.schema.trainer import ParallelConfig, TrainerConfig
from slimrl.data.model_weights import SourceLayout
from slimrl.models.family import family_of
from slimrl.models.megatron_config import MegatronModelConfig
from slimrl.models.weight_map import Entry
from slimrl.trainer.build import padded_vocab, transformer_config

RANK_ORDER = "tp-cp-ep-dp-pp"
"""Order of the parallel dimensions in the ranks, fastest first; the default of megatron-core's
initialize_model_parallel."""

Ranks = tuple[int, ...]


def source_layout(hf_config: dict[str, Any], trainer: TrainerConfig, *, mtp: bool = False) -> SourceLayout:
    """Layout of every tensor that a resync sends, in export order: its pieces, and the ranks that hold each.

    Args:
        mtp: with the layers for multi-token prediction, which the trainer has.

    Raises:
        ValueError: the model is not supported, or does not divide into the layout.
    """
    _check_world(trainer)
    family = family_of(hf_config)
    model = family.megatron_config(hf_config)
    padded = padded_vocab(model.vocab_size, trainer.parallel.tensor)
    weight_map = family.weight_map(hf_config, padded, mtp=mtp).without_copies()
    stages = planned_stages(trainer, model)
    num_experts = int(model.transformer.get("num_moe_experts") or 0)
    places = _Places(trainer.parallel, trainer.num_ranks, stages, num_experts, mtp)
    return weight_map.layout(trainer.precision.dtype, lambda index: places.of(weight_map.entries[index]))


def _check_world(trainer: TrainerConfig) -> None:
    parallel = trainer.parallel
    for sizes in (parallel.tensor * parallel.context, parallel.expert_tensor * parallel.expert):
        if trainer.num_ranks % (sizes * parallel.pipeline):
            raise ValueError(f"trainer.num_ranks: {trainer.num_ranks} do not divide into the layout {parallel}")


def layout_fields(megatron: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `trainer.megatron` that move parameters between ranks; others may need missing kernels."""
    return {name: value for name, value in megatron.items() if name in UNEVEN_PIPELINE_FIELDS}


def planned_stages(trainer: TrainerConfig, model: MegatronModelConfig) -> list[list[int]]:
    """`layers_of_stages` of a recipe, on a machine without what the recipe's precision needs too."""
    uneven = replace(trainer, megatron=layout_fields(trainer.megatron), fp8=Fp8Scaling.off, fp8_emulation=False)
    return layers_of_stages(transformer_config(uneven, model))


def layers_of_stages(config: TransformerConfig) -> list[list[int]]:
    """The layers that each pipeline rank holds in all of its virtual stages, counted from 0.

    Raises:
        ValueError: the layers cannot be assigned to the stages.
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
    """The ranks that hold each kind of weights."""

    parallel: ParallelConfig
    num_ranks: int
    stages: list[list[int]]
    """Indices of the layers of each pipeline rank."""
    num_experts: int
    mtp: bool = False
    """Whether the trainer has layers for multi-token prediction."""

    def of(self, entry: Entry) -> Sequence[Ranks]:
        """The ranks that hold each shard of an entry, ascending; several stages may hold the same shard."""
        first, *others = (self._on_stage(entry, stage) for stage in self._stages_of(entry))
        for other in others:
            first = [tuple(sorted({*a, *b})) for a, b in zip(first, other, strict=True)]
        return first

    def _on_stage(self, entry: Entry, stage: int) -> Sequence[Ranks]:
        if entry.expert is None:
            return self._dense[stage] if entry.rule.shard else [self._whole[stage]]
        holders = self._experts[stage][entry.expert * self.parallel.expert // self.num_experts]
        return holders if entry.rule.shard else [tuple(sorted(rank for shard in holders for rank in shard))]

    def _stages_of(self, entry: Entry) -> list[int]:
        """The stages that hold an entry: the embedding is on the first stage, other weights outside of layers on the
        last, a tied one on both.

        The last stage also has the embedding where there are layers for multi-token prediction, which read tokens.
        """
        if entry.layer is not None:
            return [self._stage_of_layer[entry.layer]]
        last = self.parallel.pipeline - 1
        of_embedding = {0, last} if self.mtp else {0}
        named = [of_embedding if name.startswith("embedding.") else {last} for name in entry.megatron]
        return sorted(set[int]().union(*named))

    @cached_property
    def _stage_of_layer(self) -> dict[int, int]:
        return {layer: stage for stage, layers in enumerate(self.stages) for layer in layers}

    @cached_property
    def _whole(self) -> list[Ranks]:
        """All ranks of each stage."""
        return self._groups("tp-cp-dp", tensor=self.parallel.tensor, context=self.parallel.context)

    @cached_property
    def _dense(self) -> list[tuple[Ranks, ...]]:
        """The ranks that share a shard of dense weights, by stage and tensor-parallel rank."""
        groups = self._groups("cp-dp", tensor=self.parallel.tensor, context=self.parallel.context)
        return list(batched(groups, self.parallel.tensor))

    @cached_property
    def _experts(self) -> list[tuple[tuple[Ranks, ...], ...]]:
        """The ranks that share a shard of an expert, by stage, expert-parallel rank and tensor-parallel rank of the
        expert."""
        sizes = {"tensor": self.parallel.expert_tensor, "expert": self.parallel.expert}
        return list(batched(batched(self._groups("dp", **sizes), sizes["tensor"]), sizes["expert"]))

    def _groups(self, together: str, *, tensor: int, expert: int = 1, context: int = 1) -> list[Ranks]:
        """Groups of ranks that differ only in these dimensions, in the order of the other dimensions, fastest first."""
        pipeline = self.parallel.pipeline
        data = self.num_ranks // (tensor * expert * context * pipeline)
        ranks = RankGenerator(tp=tensor, ep=expert, dp=data, pp=pipeline, cp=context, order=RANK_ORDER)
        return [tuple(sorted(group)) for group in ranks.get_ranks(together)]
