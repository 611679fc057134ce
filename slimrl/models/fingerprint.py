"""A 64-bit fingerprint of a tensor's bytes; both sides of a weight transfer compute it.

    hash = sum over rows r and units u of  R[r] * C[u] * (bits[r, u] + 1)        modulo 2^64

A unit is an element of one or two bytes, or a two-byte part of a larger element, as a signed integer; rows are those
of the last dimension. R and C are odd pseudo-random 64-bit numbers that depend on the position alone.
The order of a sum does not matter, so each rank hashes its shard and the hashes are added. Every change of a single
unit changes the hash; of all other faults, fewer than one in 10^12 goes unseen. It detects faults, not forgeries.
"""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK_UNITS = 1 << 16
"""Units hashed at a time on a CPU; as 64-bit integers they stay in its cache. A GPU takes 256 times as many."""

_ROWS_AT = 1 << 48
"""Position of the first row's key in the sequence of keys; keys of units begin at 0."""

SPLITMIX_STEP = 0x9E3779B97F4A7C15 - 2**64
_FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_UNIT = {1: torch.int8, 2: torch.int16, 4: torch.int16, 8: torch.int16}


def partial_hash(tensor: Tensor, offset: int = 0, row_stride: int | None = None) -> int:
    """Hash of a part of a tensor; the hashes of all parts add up, modulo 2^64, to the whole's.

    Args:
        tensor: any dtype with elements of 1, 2, 4 or 8 bytes, on any device.
        offset: position of its first element in the flattened whole, in elements.
        row_stride: elements from one row's start to the next in the whole, for a shard of the last dimension; None for
            a part that is contiguous in the whole.

    Returns:
        An integer in 0..2^64-1.
    """
    if tensor.numel() == 0:
        return 0
    columns = tensor.shape[-1] if tensor.ndim else 1
    bits_RU = tensor.detach().reshape(-1, columns).contiguous().view(_UNIT[tensor.element_size()])
    # A vector is one row, wherever the part begins.
    first_row, first_column = (0, offset) if tensor.ndim < 2 else divmod(offset, row_stride or columns)
    units = bits_RU.shape[1] // columns
    hashed = _rows_hash(bits_RU, first_row, first_column * units)
    return int(hashed.item()) % 2**64


def add_hashes(*hashes: int) -> int:
    return sum(hashes) % 2**64


def as_hex(value: int) -> str:
    return f"{value:016x}"


def fingerprint(tensor: Tensor) -> str:
    """16 hexadecimal digits of a whole tensor's bytes, in row-major order whatever its strides."""
    return as_hex(partial_hash(tensor))


def _rows_hash(bits_RU: Tensor, first_row: int, first_unit: int) -> Tensor:
    """int64 scalar: the sum over these rows and units; `first_row`, `first_unit`: their position in the whole."""
    device = bits_RU.device
    total = torch.zeros((), dtype=torch.int64, device=device)
    chunk = CHUNK_UNITS * (256 if device.type == "cuda" else 1)
    num_rows, num_units = bits_RU.shape
    height = max(1, min(num_rows, chunk // num_units))
    width = min(num_units, chunk)
    buffer = torch.empty(height * width, dtype=torch.int64, device=device)
    keys_U, keys_R, of_ones = _keys(first_unit, num_units, first_row, num_rows, device)
    for start, stop in _ranges(num_units, width):
        for top, bottom in _ranges(num_rows, height):
            values_RU = buffer[: (bottom - top) * (stop - start)].view(bottom - top, stop - start)
            values_RU.copy_(bits_RU[top:bottom, start:stop])
            total += (_dot_rows(values_RU, keys_U[start:stop]) * keys_R[top:bottom]).sum()
    return total + of_ones


def _dot_rows(values_RU: Tensor, keys_U: Tensor) -> Tensor:
    """Dot product of each row with the keys. Overwrites the values on a GPU: torch.mv has no integers there."""
    return values_RU.mul_(keys_U).sum(1) if values_RU.is_cuda else torch.mv(values_RU, keys_U)


def _ranges(size: int, step: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + step, size)) for start in range(0, size, step))


@functools.lru_cache(maxsize=16)
def _keys(
    first_unit: int, num_units: int, first_row: int, num_rows: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """C of these units, R of these rows, and the sum of all products of the two.

    Kept, since making them takes as long as hashing and experts share them: 8 bytes for each unit and row of 16 shapes.
    They are never written to.
    """
    units = torch.arange(first_unit, first_unit + num_units, dtype=torch.int64, device=device)
    rows = torch.arange(_ROWS_AT + first_row, _ROWS_AT + first_row + num_rows, dtype=torch.int64, device=device)
    places = torch.cat([units, rows])
    # The outputs of splitmix64 at these places, made odd.
    keys_U, keys_R = splitmix64(places.add_(1).mul_(SPLITMIX_STEP)).bitwise_or_(1).split([num_units, num_rows])
    return keys_U, keys_R, keys_U.sum() * keys_R.sum()


def splitmix64(states: Tensor) -> Tensor:
    """The outputs of SplitMix64 (Steele, Lea, Flood 2014, doi:10.1145/2660193.2660195) in these states, int64.

    They overwrite the states, which SPLITMIX_STEP separates within a sequence.
    """
    # int64 shifts are arithmetic; the masks make them logical.
    states.bitwise_xor_(states.bitwise_right_shift(30).bitwise_and_((1 << 34) - 1)).mul_(_FACTORS[0])
    states.bitwise_xor_(states.bitwise_right_shift(27).bitwise_and_((1 << 37) - 1)).mul_(_FACTORS[1])
    return states.bitwise_xor_(states.bitwise_right_shift(31).bitwise_and_((1 << 33) - 1))
