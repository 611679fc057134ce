"""RMSNorm of queries, or of keys, over all heads together, of which each tensor-parallel rank holds some (MiniMax-M2).

megatron-core has norms of each head by itself alone. Ranks add up their squares. Every rank holds the whole weight:
distributed/finalize_model_grads.py sums the gradients of all parameters called q_layernorm or k_layernorm over the
tensor-parallel group, and a rank has a gradient for its own heads alone.
"""

from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor


class HeadsNorm(torch.nn.Module):
    """Takes this rank's heads [..., heads / ranks, D], and the arguments of Megatron's norms."""

    heads_field: str
    """Field of TransformerConfig with the number of heads on all ranks."""

    def __init__(self, hidden_size: int, config: Any, eps: float) -> None:
        """Raises ValueError if tensor-parallel ranks would share a head."""
        super().__init__()
        heads, ranks = getattr(config, self.heads_field), config.tensor_model_parallel_size
        if heads % ranks:
            raise ValueError(f"trainer.parallel.tensor: {ranks} does not divide the {heads} heads of a norm")
        self.ranks, self.eps = ranks, eps
        self.weight = torch.nn.Parameter(torch.ones(heads * hidden_size, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.flatten(-2).float()
        # The first call sums the ranks' squares, the second the gradients of that sum.
        squares = copy_to_tensor_model_parallel_region(
            reduce_from_tensor_model_parallel_region(wide.square().sum(-1, keepdim=True))
        )
        normed = wide * torch.rsqrt(squares / len(self.weight) + self.eps)
        own = self.weight.view(self.ranks, -1)[mpu.get_tensor_model_parallel_rank()]
        return (normed.to(x.dtype) * own).view(x.shape)


class QueriesNorm(HeadsNorm):
    heads_field = "num_attention_heads"


class KeysNorm(HeadsNorm):
    heads_field = "num_query_groups"


def norm_over_heads(block_spec: Any) -> None:
    """Put these norms into every layer of a decoder's spec."""
    for layer in block_spec.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm, attention.k_layernorm = QueriesNorm, KeysNorm
