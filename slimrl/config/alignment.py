"""The multiple of tokens to which packed sequences are padded.

1. Ranks that share a sequence get equal chunks of it: tensor-parallel ranks one each, context-parallel ranks two each,
   one from the front and one from the back, so that causal attention costs them the same.
2. FP8 and FP4 kernels multiply whole tiles of tokens. A sequence then has a whole number of tiles on each rank, before
   and after its tensor-parallel group gathers it. megatron-core itself pads the tokens of each expert.
"""

import math

from slimrl.config.schema.precision import Fp8Scaling
from slimrl.config.schema.trainer import TrainerConfig

FP8_TOKENS, MXFP8_TOKENS, FP4_TOKENS = 16, 32, 32
"""Tokens of a tile: megatron-core, fp8_utils.get_fp8_align_size and fp4_utils.get_fp4_align_size."""


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def tile_tokens(trainer: TrainerConfig) -> int:
    """Tokens of a tile at the trainer's precision; each rank holds whole tiles of a sequence, emulated or not."""
    if trainer.fp8 is not Fp8Scaling.off:
        return MXFP8_TOKENS if trainer.fp8 is Fp8Scaling.mxfp8 else FP8_TOKENS
    return FP4_TOKENS if trainer.megatron.get("fp4") else 1


def sequence_alignment(*, tensor: int, context: int, sequence: bool, tile: int) -> int:
    """The multiple of tokens to which each packed sequence is padded; `tile` is from `tile_tokens`."""
    chunks = tensor * (2 * context if context > 1 else 1)
    return math.lcm(chunks, tile * context * (tensor if sequence else 1))
