"""To what multiple of tokens packed sequences are padded.

1. Ranks that share a sequence get equal pieces of it: tensor-parallel ranks one each, context-parallel ranks two each,
   one from the front and one from the back, so that causal attention costs them the same.
2. Kernels of reduced precision multiply whole tiles of tokens. A sequence then has a whole number of them on each rank,
   before its tensor-parallel group gathers its pieces and after. Experts, whose number of tokens follows from the
   routing, are padded by megatron-core itself.
"""

import math
from collections.abc import Mapping
from typing import Any

FP8_TOKENS, MXFP8_TOKENS, FP4_TOKENS = 16, 32, 32
"""Tokens of a tile: megatron-core, fp8_utils.get_fp8_align_size and fp4_utils.get_fp4_align_size."""


def tile_tokens(megatron: Mapping[str, Any]) -> int:
    """Tokens of which a rank's share of a sequence must be a multiple, by the precision in `trainer.megatron`."""
    if megatron.get("fp8"):
        return MXFP8_TOKENS if megatron.get("fp8_recipe") == "mxfp8" else FP8_TOKENS
    return FP4_TOKENS if megatron.get("fp4") else 1


def sequence_alignment(*, tensor: int, context: int, sequence: bool, tile: int) -> int:
    """Tokens to a multiple of which each packed sequence is padded.

    Args:
        tensor, context: ranks of these groups.
        sequence: tensor-parallel ranks share the tokens of norms and of what stands between layers.
        tile: from `tile_tokens`.
    """
    equal_pieces = tensor * (2 * context if context > 1 else 1)
    return math.lcm(equal_pieces, tile * context * (tensor if sequence else 1))
