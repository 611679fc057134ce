"""Parameters of a rank of each pipeline stage, counted in Megatron's own modules, and of the whole model.

Ranks of one stage hold equally many: tensor and expert parallelism shard evenly, and the vocabulary is padded. So one
rank of each stage is built, on the meta device, as a rank of the full world.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torch import nn

from slimrl.config.schema.trainer import ParallelConfig, TrainerConfig
from slimrl.models.megatron_config import MegatronModelConfig
from slimrl.models.parameters import count_parameters
from slimrl.models.weight_map import WeightMap
from slimrl.trainer.build import build_local_chunk, padded_vocab
from slimrl.trainer.layout.fake_world import fake_world
from slimrl.trainer.layout.source_layout import layout_fields


@dataclass(frozen=True, kw_only=True)
class ChunkParameters:
    """Sizes of the parameters of one model chunk of a rank, in the order of its modules."""

    dense: tuple[int, ...]
    experts: tuple[int, ...]
    """Sizes of the parameters of routed experts, whose gradients are reduced over the expert-data-parallel ranks"""

    @property
    def total(self) -> int:
        return sum(self.dense) + sum(self.experts)


Stage = tuple[ChunkParameters, ...]
"""The model chunks of a rank of one pipeline stage: one for each virtual stage."""


def stage_total(stage: Stage) -> int:
    return sum(chunk.total for chunk in stage)


@dataclass(frozen=True, kw_only=True)
class ModelParameters:
    total: int
    active: int
    """Number of parameters that one token uses, embedding and head included"""
    active_without_embedding: int
    """The same without the embedding, which is a lookup and no matrix product"""


def model_parameters(weight_map: WeightMap, model: MegatronModelConfig) -> ModelParameters:
    """Parameters of a model, counted in the weight map, without padding of the vocabulary and without MTP layers."""
    counts = {count.part: count for count in count_parameters(weight_map, model)}
    active = sum(count.active for count in counts.values())
    return ModelParameters(
        total=sum(count.total for count in counts.values()),
        active=active,
        active_without_embedding=active - (0 if model.tie_embeddings else counts["embedding"].active),
    )


def built_stages(trainer: TrainerConfig, model: MegatronModelConfig) -> list[Stage]:
    """The parameters of one rank of each pipeline stage.

    Raises:
        ValueError: the layout does not fit the model.
    """
    parallel, ranks = trainer.parallel, trainer.num_ranks
    stages = []
    for stage in range(parallel.pipeline):
        with fake_world(parallel, rank=stage * (ranks // parallel.pipeline), world_size=ranks):
            try:
                chunks = [
                    build_local_chunk(
                        parallel,
                        model,
                        mtp=trainer.mtp.train,
                        index=index,
                        megatron=layout_fields(trainer.megatron),
                    )
                    for index in range(parallel.virtual_pipeline or 1)
                ]
            except AssertionError as error:
                raise ValueError(f"trainer.parallel: megatron-core refuses the layout: {error}") from error
            stages.append(tuple(_count(chunk) for chunk in chunks))
    return stages


class ParameterTable:
    """The same counts for any layout, in microseconds, from the weight map alone; for comparing layouts."""

    def __init__(self, weight_map: WeightMap) -> None:
        """`weight_map` without padding of the vocabulary; with MTP layers if they are trained."""
        # Sizes of a layer's parameters that are replicated, and that are sharded over tensor-parallel ranks; then both
        # of its experts, the second over expert-tensor-parallel ranks. `_mtp`: sizes of all MTP layers.
        self._layers: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
        self._mtp = [0, 0, 0]
        self._outside: list[tuple[tuple[str, ...], int, int, bool]] = []
        for entry in weight_map.entries:
            shard = entry.rule.shard
            size = sum(prod(tensor.shape) for tensor in entry.rule.hf)
            # The expert bias of a router is a buffer, without gradient.
            if any(name.endswith("expert_bias") for name in entry.rule.megatron):
                continue
            if entry.rule.mtp:
                self._mtp[0 if shard is None else 2 if entry.expert is not None else 1] += size
            elif entry.layer is None:
                rows = entry.rule.hf[0].shape[0]
                self._outside.append((entry.megatron, rows, size // rows, shard is not None))
            else:
                self._layers[entry.layer][2 * (entry.expert is not None) + (shard is not None)] += size

    def stages(self, parallel: ParallelConfig, layers_of_stages: Sequence[Sequence[int]]) -> list[Stage]:
        """Parameters of each stage, as one chunk of one dense and one expert tensor."""
        dense = [0] * len(layers_of_stages)
        experts = [0] * len(layers_of_stages)
        for stage, layers in enumerate(layers_of_stages):
            for layer in layers:
                replicated, tensor, whole, routed = self._layers[layer]
                dense[stage] += replicated + tensor // parallel.tensor
                experts[stage] += (whole + routed // parallel.expert_tensor) // parallel.expert
        for names, rows, columns, sharded in self._outside:
            # A tied embedding is on the first and on the last stage.
            for stage in {0 if name.startswith("embedding.") else len(dense) - 1 for name in names}:
                own_rows = padded_vocab(rows, parallel.tensor) // parallel.tensor if sharded else rows
                dense[stage] += own_rows * columns
        replicated, tensor, routed = self._mtp
        if replicated:
            dense[-1] += replicated + tensor // parallel.tensor + self._embedding(parallel) * (len(dense) > 1)
            experts[-1] += routed // (parallel.expert * parallel.expert_tensor)
        return [(ChunkParameters(dense=(n,), experts=(m,)),) for n, m in zip(dense, experts, strict=True)]

    def _embedding(self, parallel: ParallelConfig) -> int:
        """Number of parameters of the embedding's copy that the last stage has for its MTP layers."""
        rows, columns = next((rows, columns) for names, rows, columns, _ in self._outside if "embedding." in names[0])
        return padded_vocab(rows, parallel.tensor) // parallel.tensor * columns


def _count(chunk: nn.Module) -> ChunkParameters:
    sizes: dict[bool, list[int]] = {False: [], True: []}
    for name, parameter in chunk.named_parameters():
        sizes[".experts." in name].append(parameter.numel())
    return ChunkParameters(dense=tuple(sizes[False]), experts=tuple(sizes[True]))
