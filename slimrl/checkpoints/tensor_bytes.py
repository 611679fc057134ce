"""The memory of CPU tensors, and reading of files into it."""

import os
from pathlib import Path

import torch
from torch import Tensor

READ_BYTES = 1 << 30
"""Bytes per read at most; Linux reads less than 2 GiB at a time."""


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def fill(descriptor: int, file: Path, buffer: memoryview, offset: int) -> None:
    """Fill the buffer with the bytes of a file from `offset` on.

    Args:
        descriptor: of the open file.
        file: named in the error.

    Raises:
        ValueError: the file is too short.
    """
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done : done + READ_BYTES]], offset + done)
        if count == 0:
            raise ValueError(f"{file}: cut short since it was opened: it ends at byte {offset + done}")
        done += count
