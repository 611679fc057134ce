"""Releases a trainer rank's device memory part by part, and restores it.

1. Weights, and the optimizer's main weights and moments, are copied to host memory, and their storages are resized to
   0. The tensor objects stay, so views of them, such as the optimizer's shards and a resync's pieces, are valid again
   once the storages are restored.
2. Gradients are dropped; they come back as zeros, as every update needs them.
3. Copies of weights in FP8, which Transformer Engine keeps, go with weights or gradients: without either nothing is
   trained. The next forward pass makes them anew.

Megatron's own optimizer offload replaces the parameters by other tensors. In float32 they are views of the weights, and
would be no longer.
On a CPU the copies are in the same memory.
"""

from collections.abc import Collection, Iterable, Iterator

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor, nn

from slimrl import device
from slimrl.data.training import MemoryPart
from slimrl.trainer.host_memory import HostMemory
from slimrl.trainer.optimizer import Optimizer


class HostCopies:
    """Copies of device storages in host memory, which is reused the next time."""

    def __init__(self) -> None:
        self._kept: dict[int, HostMemory] = {}
        """Host copies by the identity of their storage."""
        self._taken: list[torch.UntypedStorage] = []

    def take(self, tensors: Iterable[Tensor]) -> None:
        """Copy the tensors' storages and free them; the tensors must not be read until `give_back`."""
        assert not self._taken, "taken twice"
        for storage in distinct_storages(tensors):
            copy = self._host_memory(storage)
            copy.copy_(bytes_of(storage))
            storage.resize_(0)
            self._taken.append(storage)

    def give_back(self) -> None:
        for storage in self._taken:
            copy = self._kept[storage._cdata].tensor
            storage.resize_(copy.numel())
            bytes_of(storage).copy_(copy)
        self._taken = []

    def _host_memory(self, storage: torch.UntypedStorage) -> Tensor:
        kept = self._kept.get(storage._cdata)
        if kept is None or kept.tensor.numel() != storage.nbytes():
            kept = HostMemory(storage.nbytes(), pinned=storage.device.type == "cuda")
            self._kept[storage._cdata] = kept
        return kept.tensor


class Offload:
    """The device memory of one rank; at first everything is on the device."""

    def __init__(self, chunks: list[DistributedDataParallel], optimizer: Optimizer) -> None:
        self._chunks, self._optimizer = chunks, optimizer
        self._weights, self._state = HostCopies(), HostCopies()

    def release(self, parts: Collection[MemoryPart]) -> None:
        """Free the device memory of these parts, all of which are on the device."""
        on_cuda = device.device_type() == "cuda"
        if MemoryPart.gradients in parts:
            for chunk in self._chunks:
                chunk.offload_grad_buffers(synchronize=on_cuda, empty_cache=False)
        if MemoryPart.optimizer in parts:
            self._state.take(self._optimizer_tensors())
        if MemoryPart.weights in parts:
            self._weights.take(weight_tensors(self._chunks))
        if MemoryPart.weights in parts or MemoryPart.gradients in parts:
            forget_quantized_weights(self._chunks)
        if on_cuda:
            torch.cuda.empty_cache()

    def restore(self, parts: Collection[MemoryPart]) -> None:
        """Restore parts that `release` freed."""
        if MemoryPart.weights in parts:
            self._weights.give_back()
        if MemoryPart.optimizer in parts:
            self._state.give_back()
        if MemoryPart.gradients in parts:
            for chunk in self._chunks:
                chunk.restore_grad_buffers(synchronize=device.device_type() == "cuda")

    def _optimizer_tensors(self) -> list[Tensor]:
        """The optimizer's tensors without views of the weights, which the main weights of float32 training are."""
        weights = {tensor.untyped_storage()._cdata for tensor in weight_tensors(self._chunks)}
        return [t for t in self._optimizer.tensors() if t.untyped_storage()._cdata not in weights]


def weight_tensors(chunks: Iterable[DistributedDataParallel]) -> Iterator[Tensor]:
    """Parameters, and the buffers of which they are views."""
    for chunk in chunks:
        yield from chunk.parameters()
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            if buffer.param_data is not None:
                yield buffer.param_data


def forget_quantized_weights(chunks: Iterable[nn.Module]) -> None:
    """Free the copies of weights in FP8 that Transformer Engine keeps; where it finds none, it makes them anew."""
    for chunk in chunks:
        for module in chunk.modules():
            getattr(module, "_fp8_workspaces", {}).clear()


def distinct_storages(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    """The tensors' non-empty storages on the compute device, without those that Megatron keeps on the host."""
    seen = set()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen and storage.nbytes() and storage.device.type == device.device_type():
            seen.add(storage._cdata)
            yield storage


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
