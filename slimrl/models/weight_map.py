"""The rule language of weight maps: which Hugging Face tensors a Megatron tensor holds, how, and how it is sharded.

A model family is a list of rules. A name pattern may hold `{layer}` and `{expert}`, global indices, counted from 0.
Both directions, every parallel layout, and both spellings of Megatron's layers (its local layers and Transformer
Engine's) are read from this one table. The list's order is the order in which tensors are exported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from slimrl.data.protocols import TensorSpec
from slimrl.models.layout_ops import Identity, LayoutOp

if TYPE_CHECKING:
    from torch import Tensor

Slices = tuple[slice, ...]


@dataclass(frozen=True, kw_only=True)
class HfTensor:
    name: str
    shape: tuple[int, ...]
    dtype: str | None = None
    """Set where the tensor keeps a precision of its own whatever the checkpoint's, for example float32."""
    copies: tuple[str, ...] = ()
    """Further names under which a checkpoint repeats the tensor. They are written, and need not be there to read."""

    @property
    def names(self) -> tuple[str, ...]:
        """Its name and those of its copies."""
        return (self.name, *self.copies)


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Equal parts along one dimension of the Hugging Face tensors; part i lies on rank i of the group."""

    dim: int
    group: Literal["tensor", "expert_tensor"] = "tensor"
    padded_size: int | None = None
    """Size to which zeros fill the dimension up before it is cut; None where it divides as it is."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    megatron: tuple[str, ...]
    """Names under which the tensor may stand, `module.` prefixes stripped: one per layer implementation."""
    hf: tuple[HfTensor, ...]
    op: LayoutOp = field(default_factory=Identity)
    shard: Shard | None = None
    """None: every rank of the tensor-parallel group holds the whole."""
    layers: tuple[int, ...] | None = None
    """Layers that have it, for patterns with {layer}."""
    num_experts: int | None = None
    """For patterns with {expert}."""
    atomic: str | None = None
    """Pattern of a name that rules share whose tensors an engine must receive together."""
    mtp: bool = False
    """Whether it belongs to a layer for multi-token prediction, which a checkpoint may lack."""
    quantizable: bool = False
    """Whether a checkpoint in block FP8 holds it quantised: linear layers, but not embeddings, head and router."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A rule at one layer and one expert. Large models have half a million: names are made when they are asked for."""

    rule: Rule
    layer: int | None = None
    expert: int | None = None

    @cached_property
    def megatron(self) -> tuple[str, ...]:
        return tuple(map(self.named, self.rule.megatron))

    @cached_property
    def hf(self) -> tuple[HfTensor, ...]:
        return tuple(
            HfTensor(name=self.named(tensor.name), shape=tensor.shape, dtype=tensor.dtype, copies=tensor.copies)
            for tensor in self.rule.hf
        )

    @property
    def atomic(self) -> str | None:
        return self.named(self.rule.atomic) if self.rule.atomic else None

    def named(self, pattern: str) -> str:
        """The name that a pattern of the rule stands for here."""
        return pattern.replace("{layer}", str(self.layer)).replace("{expert}", str(self.expert))

    def slices(self, tensor: HfTensor, index: int, count: int) -> tuple[Slices, int]:
        """Part `index` of `count` of a Hugging Face tensor, and how many zeros follow it along the sharded dimension.

        Raises:
            ValueError: the dimension does not divide into `count` parts.
        """
        whole = tuple(slice(0, size) for size in tensor.shape)
        shard = self.rule.shard
        if shard is None:
            return whole, 0
        size = tensor.shape[shard.dim]
        padded = shard.padded_size or size
        if padded % count:
            raise ValueError(f"{tensor.name}: dimension {shard.dim} of {padded} does not divide over {count} ranks")
        part = padded // count
        start, stop = (min(edge, size) for edge in (index * part, (index + 1) * part))
        return (*whole[: shard.dim], slice(start, stop), *whole[shard.dim + 1 :]), part - (stop - start)

    def to_megatron(self, read: Callable[[str, Slices], Tensor], index: int = 0, count: int = 1) -> Tensor:
        """Shard `index` of `count` of the Megatron tensor; `read` gives a slice of a Hugging Face tensor by name."""
        return self.rule.op.to_megatron(*self.parts(read, index, count))

    def parts(self, read: Callable[[str, Slices], Tensor], index: int = 0, count: int = 1) -> Iterator[Tensor]:
        """What the shard is laid out from: that part of each Hugging Face tensor, padded, each read when it is due."""
        for tensor in self.hf:
            slices, zeros = self.slices(tensor, index, count)
            part = read(tensor.name, slices)
            if zeros:
                from torch.nn.functional import pad

                assert self.rule.shard is not None
                after = part.ndim - 1 - self.rule.shard.dim
                part = pad(part, [0, 0] * after + [0, zeros])
            yield part

    def to_hf(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Whole Hugging Face tensors, in the order of `hf`, of all shards of the Megatron tensor in rank order.

        May return views of the shards.
        """
        import torch

        shard = self.rule.shard
        if shard is None:
            (weight,) = shards
            return self.rule.op.to_hf(weight)
        columns = zip(*(self.rule.op.to_hf(part) for part in shards), strict=True)
        joined = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=shard.dim) for parts in columns)
        return tuple(
            whole.narrow(shard.dim, 0, tensor.shape[shard.dim]) for whole, tensor in zip(joined, self.hf, strict=True)
        )

    def shard_shape(self, count: int) -> tuple[int, ...]:
        """Shape of one of `count` equal shards of the Megatron tensor."""
        import torch

        def on_meta(_: str, slices: Slices) -> Tensor:
            return torch.empty([part.stop - part.start for part in slices], device="meta")

        return tuple(self.to_megatron(on_meta, 0, count).shape)


class WeightMap:
    """All entries of a model, in export order."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.entries = tuple(_expand(rules))

    @cached_property
    def hf_tensors(self) -> dict[str, HfTensor]:
        """Every Hugging Face tensor by name, in export order; without copies."""
        tensors = {tensor.name: tensor for entry in self.entries for tensor in entry.hf}
        assert len(tensors) == sum(len(entry.rule.hf) for entry in self.entries), "a Hugging Face name twice"
        return tensors

    @cached_property
    def _index(self) -> dict[str, int]:
        index = {name: i for i, entry in enumerate(self.entries) for name in entry.megatron}
        assert len(index) == sum(len(set(entry.rule.megatron)) for entry in self.entries), "a Megatron name twice"
        return index

    def index_of(self, megatron_name: str) -> int | None:
        """Position in `entries` of the tensor with this global Megatron name; None where no rule has it."""
        return self._index.get(megatron_name)

    def specs(self, dtype: str) -> list[TensorSpec]:
        """What is exported, in order, copies behind their original; `dtype` for tensors that have none of their own."""
        return [
            TensorSpec(name=name, shape=tensor.shape, dtype=tensor.dtype or dtype, atomic=entry.atomic)
            for entry in self.entries
            for tensor in entry.rule.hf
            for name in (entry.named(tensor.name), *tensor.copies)
        ]


def _expand(rules: Sequence[Rule]) -> Iterator[Entry]:
    """Neighbouring rules of layers run layer by layer, neighbouring rules of experts expert by expert."""
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
