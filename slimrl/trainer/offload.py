"""What a trainer rank holds of its device's memory, given away part by part and taken back.

1. Weights, and the optimizer's main weights and moments, are copied to host memory, and their storages shrink to
   nothing. The tensors stay the objects that they are, so that views of them, such as the shards of the optimizer and
   the pieces of a resync, hold good when the storages are filled again.
2. Gradients are dropped; they come back as zeros, which every update starts from.

Megatron's own way for the optimizer puts other tensors in the place of its parameters, which are views of the weights
in float32 and would no longer be.
On a CPU the same is done, from one place of the same memory to another.
"""

from collections.abc import Collection, Iterable, Iterator

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from slimrl import device
from slimrl.data.training import MemoryPart
from slimrl.trainer.optimizer import Optimizer


class HostCopies:
    """Contents of storages on the compute device, in host memory that is kept for the next time."""

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}
        """By the identity of the storage."""
        self._taken: list[torch.UntypedStorage] = []

    def take(self, tensors: Iterable[Tensor]) -> None:
        """Copy what the tensors lie in and free it; tensors of one storage are one. Reading them is an error now."""
        assert not self._taken, "taken twice"
        for storage in _distinct_storages(tensors):
            copy = self._host_memory(storage)
            copy.copy_(_bytes_of(storage))
            storage.resize_(0)
            self._taken.append(storage)

    def give_back(self) -> None:
        for storage in self._taken:
            copy = self._kept[storage._cdata]
            storage.resize_(copy.numel())
            _bytes_of(storage).copy_(copy)
        self._taken = []

    def _host_memory(self, storage: torch.UntypedStorage) -> Tensor:
        kept = self._kept.get(storage._cdata)
        if kept is None or kept.numel() != storage.nbytes():
            pin = storage.device.type == "cuda"
            kept = self._kept[storage._cdata] = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pin)
        return kept


class Offload:
    """The memory of one rank. It starts with everything on the device."""

    def __init__(self, chunks: list[DistributedDataParallel], optimizer: Optimizer) -> None:
        self._chunks, self._optimizer = chunks, optimizer
        self._weights, self._state = HostCopies(), HostCopies()

    def release(self, parts: Collection[MemoryPart]) -> None:
        """Give the memory of these parts, all of which are on the device, back to it."""
        on_cuda = device.device_type() == "cuda"
        if MemoryPart.gradients in parts:
            for chunk in self._chunks:
                chunk.offload_grad_buffers(synchronize=on_cuda, empty_cache=False)
        if MemoryPart.optimizer in parts:
            self._state.take(self._optimizer_tensors())
        if MemoryPart.weights in parts:
            self._weights.take(self._weight_tensors())
        if on_cuda:
            torch.cuda.empty_cache()

    def restore(self, parts: Collection[MemoryPart]) -> None:
        """Take back what `release` gave away."""
        if MemoryPart.weights in parts:
            self._weights.give_back()
        if MemoryPart.optimizer in parts:
            self._state.give_back()
        if MemoryPart.gradients in parts:
            for chunk in self._chunks:
                chunk.restore_grad_buffers(synchronize=device.device_type() == "cuda")

    def _weight_tensors(self) -> Iterator[Tensor]:
        for chunk in self._chunks:
            yield from chunk.parameters()
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                if buffer.param_data is not None:
                    yield buffer.param_data

    def _optimizer_tensors(self) -> list[Tensor]:
        """Those that are no views of the weights, as the main weights of float32 training are."""
        weights = {tensor.untyped_storage()._cdata for tensor in self._weight_tensors()}
        return [t for t in self._optimizer.tensors() if t.untyped_storage()._cdata not in weights]


def _distinct_storages(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    """Of the compute device, those that hold anything; what Megatron itself keeps on the host stays where it is."""
    seen = set()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen and storage.nbytes() and storage.device.type == device.device_type():
            seen.add(storage._cdata)
            yield storage


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
