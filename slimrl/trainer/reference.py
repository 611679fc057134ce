"""The weights of the reference policy, in host memory, in place of a second model on the device.

A swap exchanges the bytes of each weight with its copy, a piece at a time, so the device needs no room for both.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from slimrl.trainer.host_memory import HostMemory
from slimrl.trainer.offload import bytes_of, distinct_storages, weight_tensors

PIECE_BYTES = 64 * 1024**2
"""Number of bytes exchanged at a time."""


class ReferenceWeights:
    """A copy of the weights that the chunks have now."""

    def __init__(self, chunks: list[DistributedDataParallel]) -> None:
        self._chunks = chunks
        self._copies: list[HostMemory] = []
        for storage in self._storages():
            copy = HostMemory(storage.nbytes(), pinned=storage.device.type == "cuda")
            copy.tensor.copy_(bytes_of(storage))
            self._copies.append(copy)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Put these weights into the chunks within the block, and afterwards the chunks' own again, bit by bit."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for storage, copy in zip(self._storages(), self._copies, strict=True):
            device_bytes = bytes_of(storage)
            for start in range(0, len(device_bytes), PIECE_BYTES):
                piece = slice(start, start + PIECE_BYTES)
                own = device_bytes[piece].clone()
                device_bytes[piece].copy_(copy.tensor[piece])
                copy.tensor[piece].copy_(own)

    def _storages(self) -> list[torch.UntypedStorage]:
        return list(distinct_storages([*weight_tensors(self._chunks), *_expert_biases(self._chunks)]))


def _expert_biases(chunks: list[DistributedDataParallel]) -> Iterator[Tensor]:
    """Weights of the routers that are no parameters."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, TopKRouter) and module.enable_expert_bias:
                yield module.expert_bias
