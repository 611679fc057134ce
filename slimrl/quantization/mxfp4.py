"""MXFP4 as gpt-oss is published in: 4-bit floats, 32 of a row with a common power of two.

A byte of `blocks` holds two values, the first in its lower half; a byte of `scales` is an exponent with bias 127. (OCP
Microscaling Formats, version 1.0, sections 5.2 and 5.3.) bfloat16 and float32 hold every value exactly.
"""

import torch
from torch import Tensor

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantize(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The values.

    Args:
        blocks: uint8 [..., C, 16].
        scales: uint8 [..., C].

    Returns:
        [..., 32 C] in `dtype`.
    """
    table = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], dtype=dtype, device=blocks.device)
    halves = torch.stack([blocks & 0x0F, blocks >> 4], dim=-1).flatten(-2)
    values = torch.ldexp(table[halves.int()], scales.int()[..., None] - 127)
    return values.to(dtype).flatten(-2)
