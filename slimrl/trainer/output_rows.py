"""Logits of those tokens alone whose targets count: prompts, results of tools and padding need none.

The output layer of a model with a large vocabulary is a good part of its arithmetic, and its logits are the largest
tensors of a pass. Only their rows at sampled tokens enter a loss or a metric.

T tokens of a micro-batch on this rank, R of them with a target that counts, H hidden channels.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core.tensor_parallel import ColumnParallelLinear, gather_from_sequence_parallel_region
from torch import Tensor, nn


@contextmanager
def only_rows(output_layer: ColumnParallelLinear, rows_R: Tensor) -> Iterator[None]:
    """Within it the output layer multiplies these rows of its input alone.

    With sequence parallelism each rank's input is gathered first, as the layer itself would; the layer then adds up
    the gradients of the chosen rows over the tensor-parallel ranks, of which each keeps those of its own tokens.

    Args:
        output_layer: takes hidden states [T, 1, H], with sequence parallelism those of this rank's tokens.
        rows_R: int64 [R], rows of all T tokens.
    """
    sequence_parallel = output_layer.sequence_parallel

    def choose(module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden_T1H, *rest = arguments
        if sequence_parallel:
            hidden_T1H = gather_from_sequence_parallel_region(
                hidden_T1H, tensor_parallel_output_grad=False, group=output_layer.tp_group
            )
        return hidden_T1H.index_select(0, rows_R), *rest

    hook = output_layer.register_forward_pre_hook(choose)
    output_layer.sequence_parallel = False
    try:
        yield
    finally:
        output_layer.sequence_parallel = sequence_parallel
        hook.remove()


def spread(values_R: Tensor, rows_R: Tensor, num_tokens: int) -> Tensor:
    """Values [T] that are the given ones at their rows, which are all different, and 0 elsewhere."""
    return values_R.new_zeros(num_tokens).index_copy(0, rows_R, values_R)
