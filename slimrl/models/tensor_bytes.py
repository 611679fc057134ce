"""The memory of CPU tensors, and bytes of files read into it."""

import os
from pathlib import Path

import torch
from torch import Tensor

READ_BYTES = 1 << 30
"""Most bytes that the system is asked for at a time; it itself gives less than 2 GiB."""


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def read_into(descriptor: int, file: Path, tensor: Tensor, offset: int) -> None:
    """Fill a contiguous CPU tensor with what a file has from `offset` on.

    Args:
        descriptor: of the open file.
        file: named in the error.

    Raises:
        ValueError: the file ends before.
    """
    buffer = bytes_of(tensor)
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done : done + READ_BYTES]], offset + done)
        if count == 0:
            raise ValueError(f"{file}: cut short since it was opened")
        done += count
