"""A 64-bit fingerprint of a tensor's bytes that both sides of a weight transfer compute for themselves.

Each element's bits and its position in the whole tensor are mixed into 64 bits, and the results are added modulo 2^64.
A sum is indifferent to the order of its terms, so shards are hashed where they lie and their hashes added.
The mixing is the finaliser of splitmix64 (Steele, Lea, Flood 2014, doi:10.1145/2660193.2660195), one round of it.
It detects faults, not forgeries.
"""

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 16
"""Elements hashed at a time on a CPU; their 64-bit intermediates stay in its cache. A GPU takes 256 times as many."""

_POSITION_FACTOR = 0x9E3779B97F4A7C15 - 2**64
_MIX_FACTOR = 0xBF58476D1CE4E5B9 - 2**64
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def partial_hash(tensor: Tensor, offset: int = 0, row_stride: int | None = None) -> int:
    """Hash of one part of a tensor; the hashes of all parts add up, modulo 2^64, to that of the whole.

    Args:
        tensor: any dtype with elements of 1, 2, 4 or 8 bytes, on any device.
        offset: position of its first element in the flattened whole, in elements.
        row_stride: elements from the start of one row to the next in the whole, for a part that is cut along the last
            dimension; None for a part that is contiguous in the whole.

    Returns:
        An integer in 0..2^64-1.
    """
    bits = tensor.detach().contiguous().reshape(-1).view(_BITS[tensor.element_size()])
    columns = tensor.shape[-1] if tensor.ndim else 1
    chunk = CHUNK_ELEMENTS * (256 if bits.is_cuda else 1)
    sums = [
        _hash_chunk(bits[start : start + chunk], start, offset, columns, row_stride)
        for start in range(0, bits.numel(), chunk)
    ]
    return int(torch.stack(sums).sum().item()) % 2**64 if sums else 0


def add_hashes(*hashes: int) -> int:
    return sum(hashes) % 2**64


def as_hex(value: int) -> str:
    return f"{value:016x}"


def fingerprint(tensor: Tensor) -> str:
    """16 hexadecimal digits of a whole tensor's bytes, in row-major order whatever its strides."""
    return as_hex(partial_hash(tensor))


def _hash_chunk(bits: Tensor, start: int, offset: int, columns: int, row_stride: int | None) -> Tensor:
    mixed = torch.arange(start, start + bits.numel(), dtype=torch.int64, device=bits.device)
    if row_stride is not None:
        mixed = mixed + torch.div(mixed, columns, rounding_mode="floor").mul_(row_stride - columns)
    mixed.add_(offset + 1).mul_(_POSITION_FACTOR).add_(bits)
    # int64 shifts copy the sign down; the mask makes them logical.
    mixed.bitwise_xor_(mixed.bitwise_right_shift(30).bitwise_and_((1 << 34) - 1)).mul_(_MIX_FACTOR)
    mixed.bitwise_xor_(mixed.bitwise_right_shift(27).bitwise_and_((1 << 37) - 1)).mul_(_POSITION_FACTOR)
    return mixed.sum()
