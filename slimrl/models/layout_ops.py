"""How one Megatron tensor is laid out from the Hugging Face tensors that it holds.

Each operation is invertible and commutes with sharding: applied to the i-th of n equal parts of every Hugging Face
tensor, it gives the i-th shard of the Megatron tensor. So a rank reads only the rows that it needs, and shards of a
tensor-parallel group are converted back one by one and then concatenated in Hugging Face layout.
This module and the rules that use it import torch only to handle tensors: recipes are checked without it.

Shape suffixes: G query groups or key heads, Q query heads per group, D head dimension, H hidden, F feed-forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from slimrl.models.weight_map import HfTensor

DELTA_NET_PARTS = (".query", ".key", ".value", ".z", ".beta", ".alpha")
"""Names of the parts of a gated delta net's tensors in megatron-core's checkpoints"""


class LayoutOp(Protocol):
    def to_megatron(self, *weights: Tensor) -> Tensor:
        """The Megatron tensor (or shard) made of the Hugging Face tensors (or their parts), in the rule's order."""
        ...

    def to_hf(self, weight: Tensor) -> tuple[Tensor, ...]:
        """The inverse; may return views."""
        ...

    def groups(self, weight: Tensor) -> tuple[Tensor, ...]:
        """The same with one more dimension: [groups, rows of a group, ...].

        Views of the weight where rows of a group are contiguous in it, else copies.
        """
        ...

    def stored_parts(self, tensors: Sequence[HfTensor]) -> dict[str, int]:
        """The parts that megatron-core's checkpoints store by themselves: suffix of the Megatron tensor's name -> rows
        of the whole part, in the order in which they lie in the Megatron tensor."""
        ...


@dataclass(frozen=True)
class Identity:
    """Layout of one tensor that is equal on both sides."""

    def to_megatron(self, *weights: Tensor) -> Tensor:
        (weight,) = weights
        return weight

    def to_hf(self, weight: Tensor) -> tuple[Tensor, ...]:
        return (weight,)

    def groups(self, weight: Tensor) -> tuple[Tensor, ...]:
        return (weight[None] if weight.ndim else weight.view(1, 1),)

    def stored_parts(self, tensors: Sequence[HfTensor]) -> dict[str, int]:
        return _one_part(tensors)


@dataclass(frozen=True)
class GateUp:
    """Rows [gate; up] of a gated MLP: two [F, H] to [2F, H]. A tensor-parallel shard holds a part of each."""

    def to_megatron(self, *weights: Tensor) -> Tensor:
        import torch

        gate_FH, up_FH = weights
        return torch.cat([gate_FH, up_FH])

    def to_hf(self, weight: Tensor) -> tuple[Tensor, ...]:
        gate_FH, up_FH = weight.chunk(2)
        return gate_FH, up_FH

    def groups(self, weight: Tensor) -> tuple[Tensor, ...]:
        return weight.unflatten(0, (2, 1, -1)).unbind()

    def stored_parts(self, tensors: Sequence[HfTensor]) -> dict[str, int]:
        return dict(zip(("_w", "_v"), _rows(tensors), strict=True))


@dataclass(frozen=True)
class InterleavedGateUp:
    """The same of one tensor whose rows alternate, a row of gate and then one of up: [2F, H], or biases [2F]."""

    def to_megatron(self, *weights: Tensor) -> Tensor:
        (weight,) = weights
        return weight.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)

    def to_hf(self, weight: Tensor) -> tuple[Tensor, ...]:
        return (self.groups(weight)[0].flatten(0, 1),)

    def groups(self, weight: Tensor) -> tuple[Tensor, ...]:
        return (weight.unflatten(0, (2, -1)).transpose(0, 1).contiguous(),)

    def stored_parts(self, tensors: Sequence[HfTensor]) -> dict[str, int]:
        return dict.fromkeys(("_w", "_v"), sum(_rows(tensors)) // 2)


@dataclass(frozen=True)
class GroupedQKV:
    """Query, key and value interleaved by group: G times [Q query heads, 1 key head, 1 value head], each D rows.

    Takes weights [rows, H] and biases [rows] alike. With `gated`, each query head is followed by D rows of its output
    gate in the Hugging Face tensor; the Megatron tensor has Q gate heads behind the Q query heads of a group.
    """

    queries_per_group: int
    head_dim: int
    gated: bool = False

    def to_megatron(self, *weights: Tensor) -> Tensor:
        import torch

        query, key, value = weights
        tail = query.shape[1:]
        if self.gated:
            query = query.reshape(-1, self.queries_per_group, 2, self.head_dim, *tail).transpose(1, 2)
        query_GRH = query.reshape(-1, self._query_rows, *tail)
        key_GDH, value_GDH = (weight.reshape(-1, self.head_dim, *tail) for weight in (key, value))
        return torch.cat([query_GRH, key_GDH, value_GDH], dim=1).reshape(-1, *tail)

    def to_hf(self, weight: Tensor) -> tuple[Tensor, ...]:
        query, key, value = (part.flatten(0, 1) for part in self.groups(weight))
        return query, key, value

    def groups(self, weight: Tensor) -> tuple[Tensor, ...]:
        sizes = [self._query_rows, self.head_dim, self.head_dim]
        query, key, value = weight.unflatten(0, (-1, sum(sizes))).split(sizes, dim=1)
        if self.gated:
            query = query.unflatten(1, (2, self.queries_per_group, self.head_dim)).transpose(1, 2).flatten(1, 3)
        return query, key, value

    def stored_parts(self, tensors: Sequence[HfTensor]) -> dict[str, int]:
        return _one_part(tensors)

    @property
    def _query_rows(self) -> int:
        return (2 if self.gated else 1) * self.queries_per_group * self.head_dim


@dataclass(frozen=True)
class DeltaNetInput:
    """The input projections of a gated delta net, with V value heads for each of G key heads.

    Hugging Face has two tensors, interleaved by key head: G times [query head, key head, V value heads, V gate heads],
    and G times [V betas, V alphas]. Megatron has one: all query heads, then all keys, values, gates, betas, alphas.
    """

    values_per_key: int
    key_dim: int
    value_dim: int

    def to_megatron(self, *weights: Tensor) -> Tensor:
        import torch

        parts = [
            part
            for weight, sizes in zip(weights, self.rows, strict=True)
            for part in weight.unflatten(0, (-1, sum(sizes))).split(sizes, dim=1)
        ]
        return torch.cat([part.flatten(0, 1) for part in parts])

    def to_hf(self, weight: Tensor) -> tuple[Tensor, ...]:
        return tuple(groups.flatten(0, 1) for groups in self.groups(weight))

    def groups(self, weight: Tensor) -> tuple[Tensor, ...]:
        import torch

        rows = [size for sizes in self.rows for size in sizes]
        heads = weight.shape[0] // sum(rows)
        parts = [part.unflatten(0, (heads, -1)) for part in weight.split([heads * size for size in rows])]
        return torch.cat(parts[:4], dim=1), torch.cat(parts[4:], dim=1)

    def stored_parts(self, tensors: Sequence[HfTensor]) -> dict[str, int]:
        sizes = [size for of_tensor in self.rows for size in of_tensor]
        heads = sum(_rows(tensors)) // sum(sizes)
        return {part: heads * size for part, size in zip(DELTA_NET_PARTS, sizes, strict=True)}

    @property
    def rows(self) -> tuple[list[int], list[int]]:
        """Rows of one key head by part, for each of the two Hugging Face tensors."""
        values = self.values_per_key * self.value_dim
        return [self.key_dim, self.key_dim, values, values], [self.values_per_key] * 2


@dataclass(frozen=True)
class DeltaNetParts:
    """Tensors of a gated delta net that hold, one after the other, the parts of the Megatron tensor in its order.

    A tensor with several parts has them as its `sections`: a shard of either side has a part of each.
    """

    rows: tuple[int, ...]
    """Rows of each whole tensor."""

    def to_megatron(self, *weights: Tensor) -> Tensor:
        import torch

        return torch.cat(weights)

    def to_hf(self, weight: Tensor) -> tuple[Tensor, ...]:
        shards = sum(self.rows) // weight.shape[0]
        return weight.split([rows // shards for rows in self.rows])

    def groups(self, weight: Tensor) -> tuple[Tensor, ...]:
        return tuple(part[None] for part in self.to_hf(weight))

    def stored_parts(self, tensors: Sequence[HfTensor]) -> dict[str, int]:
        rows = [rows for tensor in tensors for rows in tensor.sections or tensor.shape[:1]]
        # A convolution has the first three.
        names = DELTA_NET_PARTS[:3] if len(rows) == 3 else DELTA_NET_PARTS
        return dict(zip(names, rows, strict=True))


def _rows(tensors: Sequence[HfTensor]) -> list[int]:
    return [tensor.shape[0] for tensor in tensors]


def _one_part(tensors: Sequence[HfTensor]) -> dict[str, int]:
    return {"": sum(_rows(tensors))}
