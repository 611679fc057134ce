"""Tensors into the flat buffer of their bucket."""

import torch
from torch import Tensor

from slimrl.data.protocols import BucketSpec


class BucketPacker:
    """Fills a buffer with a bucket's tensors, in whatever order they come.

    Args:
        buffer: uint8, at least `bucket.nbytes` long, starting on a multiple of every element size.
    """

    def __init__(self, bucket: BucketSpec, buffer: Tensor) -> None:
        self._buffer = buffer
        self._missing = {part.spec.name: (part.spec, part.offset) for part in bucket.parts}

    def put(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor to its place; its shape and dtype must be the declared ones."""
        assert name in self._missing, f"{name} is not due in this bucket"
        spec, offset = self._missing.pop(name)
        dtype = getattr(torch, spec.dtype)
        assert (tuple(tensor.shape), tensor.dtype) == (spec.shape, dtype), (
            f"{name}: {list(tensor.shape)} {tensor.dtype}, declared {list(spec.shape)} {spec.dtype}"
        )
        nbytes = tensor.numel() * dtype.itemsize
        self._buffer[offset : offset + nbytes].view(dtype).view(spec.shape).copy_(tensor)

    @property
    def is_full(self) -> bool:
        return not self._missing
