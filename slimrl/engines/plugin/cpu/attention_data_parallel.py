"""What attention data parallelism lacks without a GPU: the sum of all ranks' outputs, scattered by requests."""

from typing import Any

from torch import Tensor


def reduce_scatterv(group: Any, input_: Tensor, output: Tensor | None = None, sizes: list[int] | None = None) -> Tensor:
    """Replaces GroupCoordinator.reduce_scatterv, which needs NCCL, by SGLang's own for deterministic runs."""
    result: Tensor = group._deterministic_reduce_scatterv(input_, output, sizes)
    return result
