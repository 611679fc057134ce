"""Collectives that gloo lacks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_patches.respell import rebind


def emulate_uneven_collectives() -> None:
    """tensor_parallel/mappings.py:151 and 193: all-gather and reduce-scatter of unequal pieces.

    Experts that are themselves tensor-parallel need them. NCCL takes unequal sizes, gloo does not: pieces are padded
    to the longest, and the reduction is done whole and then cut.
    """
    from megatron.core.tensor_parallel import mappings

    even_gather, even_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather(
        input_: Tensor, group: Any, output_split_sizes: Sequence[int] | None = None, use_global_buffer: bool = False
    ) -> Tensor:
        if group.size() == 1 or output_split_sizes is None:
            return even_gather(input_, group, output_split_sizes, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        padded = input_.new_zeros((max(sizes), *input_.shape[1:]))
        padded[: input_.shape[0]] = input_
        parts = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def scatter(
        input_: Tensor, group: Any, input_split_sizes: Sequence[int] | None = None, use_global_buffer: bool = False
    ) -> Tensor:
        if group.size() == 1 or input_split_sizes is None:
            return even_scatter(input_, group, input_split_sizes, use_global_buffer)
        total = input_.contiguous().clone()
        torch.distributed.all_reduce(total, group=group)
        return torch.split(total, [int(size) for size in input_split_sizes])[group.rank()].contiguous()

    rebind(mappings, "_gather_along_first_dim", gather)
    rebind(mappings, "_reduce_scatter_along_first_dim", scatter)
