"""Weight maps: which Hugging Face tensors a Megatron tensor holds, in which layout, and how it is sharded.

A model family is a list of rules. A name pattern may hold `{layer}` and `{expert}`, global indices from 0.
This one table serves both directions, every parallel layout, and both names of a tensor in Megatron (those of its local
layers and of Transformer Engine's). Tensors are exported in the order of the list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, groupby, islice, pairwise
from typing import TYPE_CHECKING, Literal

from slimrl.data.model_weights import Region, SourceLayout, SourcePiece, TensorSpec
from slimrl.models.layout_ops import Identity, LayoutOp

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class HfTensor:
    name: str
    shape: tuple[int, ...]
    dtype: str | None = None
    """Dtype of a tensor that keeps its own whatever the checkpoint's is, for example float32; None for the
    checkpoint's."""
    copies: tuple[str, ...] = ()
    """Further names under which a checkpoint may repeat the tensor. They are written; a checkpoint may lack them."""
    quantizable: bool = True
    """Whether the tensor is quantised if its rule is `quantizable`."""
    stacked: str | None = None
    """Name under which files hold this tensor of all experts as one, [experts, *shape], matrices transposed; None for
    one that they hold by itself (checkpoints/stacked_experts.py)."""
    sections: tuple[int, ...] = ()
    """Sizes of the sections of dimension 0, if each is sharded by itself: rank i holds part i of every section."""

    @property
    def names(self) -> tuple[str, ...]:
        """The tensor's name and those of its copies."""
        return (self.name, *self.copies)


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Sharding into equal parts along one dimension of the Hugging Face tensors; rank i of the group holds part i."""

    dim: int
    group: Literal["tensor", "expert_tensor"] = "tensor"
    padded_size: int | None = None
    """Size to which the dimension is padded with zeros before it is sharded; None without padding."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    megatron: tuple[str, ...]
    """Possible names of the tensor, without `module.` prefixes: one per layer implementation."""
    hf: tuple[HfTensor, ...]
    op: LayoutOp = field(default_factory=Identity)
    shard: Shard | None = None
    """Sharding of the tensor; None if every rank of the tensor-parallel group holds the whole."""
    layers: tuple[int, ...] | None = None
    """Indices of the layers that have the tensor, if the patterns hold {layer}."""
    num_experts: int | None = None
    """Number of experts that have the tensor, if the patterns hold {expert}."""
    fused_group: str | None = None
    """Pattern of a name common to rules whose tensors engines hold as one matrix, so that all or none are quantised."""
    mtp: bool = False
    """Whether it belongs to a layer for multi-token prediction, which a checkpoint may lack."""
    quantizable: bool = False
    """Whether a checkpoint in block FP8 holds it quantised: linear layers, but not embeddings, head and router."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A rule at one layer and one expert. Large models have half a million of them, so names are made on demand."""

    rule: Rule
    layer: int | None = None
    expert: int | None = None

    @cached_property
    def megatron(self) -> tuple[str, ...]:
        return tuple(map(self.named, self.rule.megatron))

    @cached_property
    def hf(self) -> tuple[HfTensor, ...]:
        return tuple(
            replace(tensor, name=self.named(tensor.name), stacked=tensor.stacked and self.named(tensor.stacked))
            for tensor in self.rule.hf
        )

    @property
    def fused_group(self) -> str | None:
        return self.named(self.rule.fused_group) if self.rule.fused_group else None

    def named(self, pattern: str) -> str:
        """A pattern of the rule with this layer and expert filled in."""
        return pattern.replace("{layer}", str(self.layer)).replace("{expert}", str(self.expert))

    def blocks(self, tensor: HfTensor, index: int, count: int) -> tuple[list[Region], int]:
        """Part `index` of `count` of a Hugging Face tensor, and the zeros that pad it along the sharded dimension.

        The part is one block, or a block of each of its sections, to be joined along dimension 0.

        Raises:
            ValueError: the dimension does not divide into `count` parts.
        """
        whole = tuple(slice(0, size) for size in tensor.shape)
        shard = self.rule.shard
        if shard is None:
            return [whole], 0
        size = tensor.shape[shard.dim]
        edges = list(accumulate(tensor.sections or (shard.padded_size or size,), initial=0))
        blocks, zeros = [], 0
        for first, end in pairwise(edges):
            if (end - first) % count:
                raise ValueError(
                    f"{tensor.name}: dimension {shard.dim} of {end - first} does not divide over {count} ranks"
                )
            part = (end - first) // count
            start, stop = (min(first + edge, size) for edge in (index * part, (index + 1) * part))
            zeros += part - (stop - start)
            blocks.append((*whole[: shard.dim], slice(start, stop), *whole[shard.dim + 1 :]))
        return blocks, zeros

    def to_megatron(self, read: Callable[[str, Region], Tensor], index: int = 0, count: int = 1) -> Tensor:
        """Shard `index` of `count` of the Megatron tensor; `read` reads a slice of a Hugging Face tensor by name."""
        return self.rule.op.to_megatron(*self.parts(read, index, count))

    def parts(self, read: Callable[[str, Region], Tensor], index: int = 0, count: int = 1) -> Iterator[Tensor]:
        """Part `index` of each Hugging Face tensor, padded; lazily, so that each can be freed before the next."""
        for tensor in self.hf:
            blocks, zeros = self.blocks(tensor, index, count)
            part = read(tensor.name, blocks[0])
            if len(blocks) > 1:
                import torch

                part = torch.cat([part, *(read(tensor.name, block) for block in blocks[1:])])
            if zeros:
                from torch.nn.functional import pad

                assert self.rule.shard is not None
                after = part.ndim - 1 - self.rule.shard.dim
                part = pad(part, [0, 0] * after + [0, zeros])
            yield part

    def to_hf(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Whole Hugging Face tensors, in the order of `hf`, from all shards of the Megatron tensor in rank order.

        May return views of the shards.
        """
        shard = self.rule.shard
        if shard is None:
            (weight,) = shards
            return self.rule.op.to_hf(weight)
        columns = zip(*(self.rule.op.to_hf(part) for part in shards), strict=True)
        return tuple(
            _joined(parts, tensor.sections, shard.dim).narrow(shard.dim, 0, tensor.shape[shard.dim])
            for parts, tensor in zip(columns, self.hf, strict=True)
        )


def _joined(parts: Sequence[Tensor], sections: tuple[int, ...], dim: int) -> Tensor:
    """The whole tensor of equal parts, in rank order."""
    import torch

    if len(parts) == 1:
        return parts[0]
    if sections:
        sizes = [size // len(parts) for size in sections]
        by_section = zip(*(part.split(sizes) for part in parts), strict=True)
        parts = [piece for section in by_section for piece in section]
    return torch.cat(list(parts), dim=dim)


class WeightMap:
    """All entries of a model, in export order; they are made when they are asked for, since those of a thousand
    experts take long and the rules alone say much."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = tuple(rules)

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(_expand(self.rules))

    @cached_property
    def hf_tensors(self) -> dict[str, HfTensor]:
        """All Hugging Face tensors by name, in export order, without copies."""
        tensors = {tensor.name: tensor for entry in self.entries for tensor in entry.hf}
        assert len(tensors) == sum(len(entry.rule.hf) for entry in self.entries), "a Hugging Face name twice"
        return tensors

    def without_copies(self) -> WeightMap:
        """The same weights, each under one name."""
        return WeightMap(
            [replace(rule, hf=tuple(replace(tensor, copies=()) for tensor in rule.hf)) for rule in self.rules]
        )

    @property
    def originals(self) -> dict[str, str]:
        """Name of a copy -> name of the tensor that it repeats."""
        return {copy: tensor.name for tensor in self.hf_tensors.values() for copy in tensor.copies}

    @cached_property
    def stacked(self) -> dict[str, tuple[str, int]]:
        """Name of an expert's tensor -> name of the one in which files hold those of all experts, and index there."""
        if not any(tensor.stacked for rule in self.rules for tensor in rule.hf):
            return {}
        return {
            tensor.name: (tensor.stacked, entry.expert)
            for entry in self.entries
            for tensor in entry.hf
            if tensor.stacked is not None and entry.expert is not None
        }

    @cached_property
    def _index(self) -> dict[str, int]:
        index = {name: i for i, entry in enumerate(self.entries) for name in entry.megatron}
        assert len(index) == sum(len(set(entry.rule.megatron)) for entry in self.entries), "a Megatron name twice"
        return index

    def index_of(self, megatron_name: str) -> int | None:
        """Index in `entries` of the tensor with this global Megatron name; None if no rule has it."""
        return self._index.get(megatron_name)

    def specs(self, dtype: str) -> list[TensorSpec]:
        """What is exported, in order, copies after their original; `dtype` for tensors without one of their own."""
        return [
            TensorSpec(
                name=name,
                shape=tensor.shape,
                dtype=tensor.dtype or dtype,
                mtp=entry.rule.mtp,
            )
            for entry in self.entries
            for tensor in entry.rule.hf
            for name in (entry.named(tensor.name), *tensor.copies)
        ]

    def layout(self, dtype: str, holders_of: Callable[[int], Sequence[tuple[int, ...]]]) -> SourceLayout:
        """The trainer's pieces of every tensor, in export order.

        Args:
            dtype: of tensors without one of their own.
            holders_of: index of an entry -> the ranks that hold each of its shards.
        """
        specs = iter(self.specs(dtype))
        layout: dict[TensorSpec, tuple[SourcePiece, ...]] = {}
        for index, entry in enumerate(self.entries):
            holders = holders_of(index)
            for tensor in entry.hf:
                pieces = tuple(
                    piece for shard in range(len(holders)) for piece in _pieces(entry, tensor, shard, holders)
                )
                layout |= dict.fromkeys(islice(specs, len(tensor.names)), pieces)
        return layout


def _pieces(entry: Entry, tensor: HfTensor, shard: int, holders: Sequence[tuple[int, ...]]) -> Iterator[SourcePiece]:
    """What the holders of a shard have of a tensor; a shard may be padding alone."""
    first_row = 0
    for region in entry.blocks(tensor, shard, len(holders))[0]:
        if all(part.start < part.stop for part in region):
            yield SourcePiece(region=region, holders=holders[shard], first_row=first_row)
            first_row += region[0].stop - region[0].start if region else 1


def _expand(rules: Sequence[Rule]) -> Iterator[Entry]:
    """Neighbouring rules with {layer} expand layer by layer, neighbouring rules with {expert} expert by expert."""
    for in_layers, block in groupby(rules, lambda rule: rule.layers is not None):
        members = list(block)
        if not in_layers:
            yield from _expand_experts(members, None)
            continue
        for layer in sorted({layer for rule in members for layer in rule.layers or ()}):
            yield from _expand_experts([rule for rule in members if layer in (rule.layers or ())], layer)


def _expand_experts(rules: Sequence[Rule], layer: int | None) -> Iterator[Entry]:
    for num_experts, block in groupby(rules, lambda rule: rule.num_experts):
        members = list(block)
        for expert in range(num_experts) if num_experts is not None else (None,):
            for rule in members:
                yield Entry(rule=rule, layer=layer, expert=expert)
