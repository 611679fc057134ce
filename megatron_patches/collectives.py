"""Collectives that gloo lacks, one that it is slow at, and the split sizes of those that it has."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_patches.patching import patch_attr


def emulate_uneven_collectives() -> None:
    """tensor_parallel/mappings.py: all-gather and reduce-scatter of unequal sizes.

    Tensor-parallel experts need them. NCCL takes unequal sizes, gloo does not: the gather pads each rank's part to the
    longest, and the scatter reduces the whole tensor and then takes the rank's part.
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

    patch_attr(mappings, "_gather_along_first_dim", gather)
    patch_attr(mappings, "_reduce_scatter_along_first_dim", scatter)


def convert_split_sizes() -> None:
    """transformer/moe/moe_utils.py converts split sizes to numpy only if they are on a GPU.

    The all-to-all of the token dispatcher (tensor_parallel/mappings.py) needs them as numbers on any device.
    """
    from megatron.core.transformer.moe import moe_utils

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    patch_attr(moe_utils, "maybe_move_tensor_to_cpu", move)


def leave_gradients_of_one_rank() -> None:
    """distributed/param_and_grad_buffer.py reduces gradients over a group of one rank too.

    NCCL leaves them where they are, gloo copies all of them to new memory and back. An asynchronous reduction, of which
    Megatron waits for a handle, stays as it is.
    """
    from megatron.core.distributed import param_and_grad_buffer

    reduce_scatter = param_and_grad_buffer.dist_reduce_scatter_func

    def reduce(output: Tensor, input: Tensor, *args: Any, group: Any, async_op: bool = False, **options: Any) -> Any:
        in_place = (output.data_ptr(), output.shape) == (input.data_ptr(), input.shape)
        if in_place and group.size() == 1 and not async_op:
            return None
        return reduce_scatter(output, input, *args, group=group, async_op=async_op, **options)

    patch_attr(param_and_grad_buffer, "dist_reduce_scatter_func", reduce)
