"""Parameters of every distinct rank, counted in Megatron's own modules, and of the model as a whole.

Ranks of one pipeline stage hold equally many, for tensor and expert parallelism cut evenly and the vocabulary is padded
to what they divide. So one rank of each stage is built, on the meta device, as a rank of the full world.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import nn

from slimrl.config.model_rules import UNEVEN_PIPELINE_FIELDS
from slimrl.config.schema import ParallelConfig, TrainerConfig
from slimrl.models.megatron_config import MegatronModelConfig
from slimrl.models.weight_map import WeightMap
from slimrl.trainer.build import build_local_chunk, padded_vocab
from slimrl.trainer.fake_world import fake_world


@dataclass(frozen=True, kw_only=True)
class ChunkParameters:
    """Sizes of the tensors of one model chunk of a rank, in the order of its modules."""

    dense: tuple[int, ...]
    experts: tuple[int, ...]
    """Of routed experts, whose gradients are reduced over fewer ranks."""

    @property
    def total(self) -> int:
        return sum(self.dense) + sum(self.experts)


Stage = tuple[ChunkParameters, ...]
"""The chunks of a rank of one pipeline stage: one, or as many as there are virtual stages."""


def stage_total(stage: Stage) -> int:
    return sum(chunk.total for chunk in stage)


@dataclass(frozen=True, kw_only=True)
class ModelParameters:
    total: int
    active: int
    """Those that one token passes through, embedding and head included."""
    active_without_embedding: int
    """As many, without the embedding, in which a token is looked up and nothing multiplied."""


def model_parameters(weight_map: WeightMap, *, topk: int) -> ModelParameters:
    """Counted in the table of weights, each once: without padding of the vocabulary and without layers for MTP."""
    total = active = embedding = 0
    # The sum over experts is divided at the end, so that it is exact: they are all alike.
    unit = next((entry.rule.num_experts for entry in weight_map.entries if entry.rule.num_experts), 1)
    for entry in weight_map.entries:
        size = sum(prod(tensor.shape) for tensor in entry.rule.hf)
        total += size
        active += size * (topk if entry.rule.num_experts else unit)
        if set(entry.rule.megatron) == {"embedding.word_embeddings.weight"}:
            embedding += size
    return ModelParameters(total=total, active=active // unit, active_without_embedding=active // unit - embedding)


def layout_fields(megatron: Mapping[str, Any]) -> dict[str, Any]:
    """Of `trainer.megatron`, what moves parameters between ranks; the rest may need kernels that are not here."""
    return {name: value for name, value in megatron.items() if name in UNEVEN_PIPELINE_FIELDS}


def built_stages(trainer: TrainerConfig, model: MegatronModelConfig) -> list[Stage]:
    """By pipeline stage, the parameters of one of its ranks.

    Raises:
        ValueError: the model does not divide into the layout.
    """
    parallel, ranks = trainer.parallel, trainer.num_ranks
    stages = []
    for stage in range(parallel.pipeline):
        with fake_world(parallel, rank=stage * (ranks // parallel.pipeline), world_size=ranks):
            try:
                chunks = [
                    build_local_chunk(parallel, model, mtp=False, index=index, megatron=layout_fields(trainer.megatron))
                    for index in range(parallel.virtual_pipeline or 1)
                ]
            except AssertionError as error:
                raise ValueError(f"trainer.parallel: megatron-core refuses the layout: {error}") from error
            stages.append(tuple(_count(chunk) for chunk in chunks))
    return stages


@dataclass(frozen=True, kw_only=True)
class LayerCount:
    """Elements of one layer by how they are cut."""

    whole: int = 0
    cut: int = 0
    """Over tensor-parallel ranks"""
    experts: int = 0
    """Over expert- and expert-tensor-parallel ranks"""


class ParameterTable:
    """The same counts for any layout from the table of weights alone, in microseconds, with which layouts are tried."""

    def __init__(self, weight_map: WeightMap) -> None:
        """`weight_map` without padding of the vocabulary."""
        counts: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
        self._outside: list[tuple[tuple[str, ...], int, int, bool]] = []
        for entry in weight_map.entries:
            shard = entry.rule.shard
            size = sum(prod(tensor.shape) for tensor in entry.rule.hf)
            if not _is_parameter(entry.rule.megatron):
                continue
            if entry.layer is None:
                rows = entry.rule.hf[0].shape[0]
                self._outside.append((entry.megatron, rows, size // rows, shard is not None))
            else:
                counts[entry.layer][0 if shard is None else 2 if entry.expert is not None else 1] += size
        self._layers = {
            layer: LayerCount(whole=whole, cut=cut, experts=experts) for layer, (whole, cut, experts) in counts.items()
        }

    def stages(self, parallel: ParallelConfig, layers_of_stages: Sequence[Sequence[int]]) -> list[Stage]:
        """Each stage as one chunk of one dense and one expert tensor."""
        dense = [0] * len(layers_of_stages)
        experts = [0] * len(layers_of_stages)
        for stage, layers in enumerate(layers_of_stages):
            for layer in layers:
                count = self._layers[layer]
                dense[stage] += count.whole + count.cut // parallel.tensor
                experts[stage] += count.experts // (parallel.expert * parallel.expert_tensor)
        for names, rows, columns, cut in self._outside:
            # A tied embedding is on the first stage and on the last.
            for stage in {0 if name.startswith("embedding.") else len(dense) - 1 for name in names}:
                share = padded_vocab(rows, parallel.tensor) // parallel.tensor if cut else rows
                dense[stage] += share * columns
        return [(ChunkParameters(dense=(whole,), experts=(cut,)),) for whole, cut in zip(dense, experts, strict=True)]


def _is_parameter(names: Sequence[str]) -> bool:
    """The bias that chooses experts is a buffer, which no gradient moves."""
    return not any(name.endswith("expert_bias") for name in names)


def _count(chunk: nn.Module) -> ChunkParameters:
    return ChunkParameters(dense=tuple(_sizes(chunk, False)), experts=tuple(_sizes(chunk, True)))


def _sizes(chunk: nn.Module, experts: bool) -> Iterator[int]:
    for name, parameter in chunk.named_parameters():
        if (".experts." in name) == experts:
            yield parameter.numel()
