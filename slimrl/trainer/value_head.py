"""The output layer of a critic: one number for each token in place of logits."""

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn

PARAMETER = "output_layer.weight"
"""Name of the value head's parameter, which Megatron expects; the output layer of a model that is no critic has the
same."""


def attach_value_head(chunk: GPTModel) -> None:
    """Replace the output layer, where this chunk has it."""
    if chunk.post_process:
        chunk.output_layer = ValueHead(chunk.config)


def is_value_head(chunk: GPTModel, name: str) -> bool:
    """Whether a parameter of the chunk, by its name, is that of a value head."""
    return name == PARAMETER and isinstance(chunk.output_layer, ValueHead)


class ValueHead(nn.Module):
    """v = w h in float32, the same on every tensor-parallel rank. It starts at 0, so that every value does.

    Each of these ranks computes the whole gradient from all tokens, so it is not reduced over them.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))

    def forward(self, hidden_T1H: Tensor, weight: None = None, **_: Any) -> tuple[Tensor, None]:
        """Values [T, 1, 1] of all tokens, and no bias; called as Megatron's output layer is."""
        if self.sequence_parallel:
            hidden_T1H = gather_from_sequence_parallel_region(hidden_T1H, tensor_parallel_output_grad=False)
        return nn.functional.linear(hidden_T1H.float(), self.weight.float()), None
