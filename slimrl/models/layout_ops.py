"""How one Megatron tensor is laid out from the Hugging Face tensors that it holds.

Each operation is invertible, and it commutes with sharding: applied to the i-th of n equal parts of every Hugging Face
tensor it gives the i-th shard of the Megatron tensor. A rank therefore reads only the rows that it needs, and shards of
a tensor-parallel group are turned back one by one and then joined in Hugging Face layout.
This module and the rules above it import torch only where tensors are handled: a recipe is checked without it.

Shape suffixes: G query groups, Q query heads per group, D head dimension, H hidden, F feed-forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class LayoutOp(Protocol):
    def to_megatron(self, *weights: Tensor) -> Tensor:
        """The Megatron tensor (or shard) of the Hugging Face tensors (or their parts), in the rule's order."""
        ...

    def to_hf(self, weight: Tensor) -> tuple[Tensor, ...]:
        """The inverse; may return views."""
        ...

    def groups(self, weight: Tensor) -> tuple[Tensor, ...]:
        """The same as views of the weight, with one more dimension: [groups, rows of a group, ...].

        Rows of one group lie next to each other in the weight.
        """
        ...


@dataclass(frozen=True)
class Identity:
    """One tensor, equal on both sides."""

    def to_megatron(self, *weights: Tensor) -> Tensor:
        (weight,) = weights
        return weight

    def to_hf(self, weight: Tensor) -> tuple[Tensor, ...]:
        return (weight,)

    def groups(self, weight: Tensor) -> tuple[Tensor, ...]:
        return (weight[None] if weight.ndim else weight.view(1, 1),)


@dataclass(frozen=True)
class GateUp:
    """Rows [gate; up] of a gated MLP: two [F, H] to [2F, H]. A tensor-parallel shard holds a piece of each."""

    def to_megatron(self, *weights: Tensor) -> Tensor:
        import torch

        gate_FH, up_FH = weights
        return torch.cat([gate_FH, up_FH])

    def to_hf(self, weight: Tensor) -> tuple[Tensor, ...]:
        gate_FH, up_FH = weight.chunk(2)
        return gate_FH, up_FH

    def groups(self, weight: Tensor) -> tuple[Tensor, ...]:
        return weight.unflatten(0, (2, 1, -1)).unbind()


@dataclass(frozen=True)
class GroupedQKV:
    """Query, key and value interleaved by group: G times [Q query heads, 1 key head, 1 value head], each D rows.

    Takes weights [rows, H] and biases [rows] alike.
    """

    queries_per_group: int
    head_dim: int

    def to_megatron(self, *weights: Tensor) -> Tensor:
        import torch

        query, key, value = weights
        tail = query.shape[1:]
        query_GRH = query.reshape(-1, self.queries_per_group * self.head_dim, *tail)
        key_GDH, value_GDH = (weight.reshape(-1, self.head_dim, *tail) for weight in (key, value))
        return torch.cat([query_GRH, key_GDH, value_GDH], dim=1).reshape(-1, *tail)

    def to_hf(self, weight: Tensor) -> tuple[Tensor, ...]:
        query, key, value = (part.flatten(0, 1) for part in self.groups(weight))
        return query, key, value

    def groups(self, weight: Tensor) -> tuple[Tensor, ...]:
        sizes = [self.queries_per_group * self.head_dim, self.head_dim, self.head_dim]
        return weight.unflatten(0, (-1, sum(sizes))).split(sizes, dim=1)
