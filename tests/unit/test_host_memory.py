"""Host memory of released device memory: locked page by page and no more, with a stand-in for CUDA's runtime."""

import gc
import mmap
from pathlib import Path

import pytest
import torch

from slimrl import device
from slimrl.trainer import offload
from slimrl.trainer.host_memory import HostMemory, whole_pages
from slimrl.trainer.offload import HostCopies

pytestmark = pytest.mark.skipif(device.device_type() == "cuda", reason="the locked memory here is ordinary")

PAGE = mmap.PAGESIZE


class Runtime:
    """cudaHostRegister and cudaHostUnregister: what is locked, by address."""

    def __init__(self):
        self.locked, self.refuses = {}, False

    def cudaHostRegister(self, address, nbytes, flags):
        assert flags == 0
        if self.refuses:
            return 2
        assert not any(start < address + nbytes and address < start + size for start, size in self.locked.items())
        self.locked[address] = nbytes
        return 0

    def cudaHostUnregister(self, address):
        assert is_mapped(address), "it is unmapped already"
        del self.locked[address]
        return 0


def is_mapped(address):
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= address < int(stop, 16) for start, stop in ranges)


@pytest.fixture
def runtime(monkeypatch):
    made = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    return made


def test_no_more_is_locked_than_whole_pages(runtime):
    """torch's pinned memory of 2**20 + 1 bytes takes 2**21."""
    kept = [HostMemory(nbytes, pinned=True) for nbytes in (1, PAGE, PAGE + 1, 2**20 + 1)]
    assert [memory.tensor.numel() for memory in kept] == [1, PAGE, PAGE + 1, 2**20 + 1]
    assert sorted(runtime.locked.values()) == [PAGE, PAGE, 2 * PAGE, 2**20 + PAGE]
    assert {memory.tensor.data_ptr() for memory in kept} == runtime.locked.keys()
    for memory in kept:
        memory.tensor.fill_(7)
        assert bool((memory.tensor == 7).all())
    assert [whole_pages(nbytes) for nbytes in (0, 1, PAGE, PAGE + 1)] == [0, PAGE, PAGE, 2 * PAGE]


def test_memory_is_unlocked_before_it_is_unmapped(runtime):
    memory = HostMemory(3 * PAGE, pinned=True)
    assert len(runtime.locked) == 1
    del memory
    gc.collect()
    assert runtime.locked == {}


def test_without_a_gpu_nothing_is_locked(runtime):
    assert HostMemory(10, pinned=False).tensor.shape == (10,)
    assert runtime.locked == {}


def test_memory_that_cannot_be_locked_is_an_error(runtime):
    runtime.refuses = True
    with pytest.raises(MemoryError, match=f"cannot lock {2 * PAGE} bytes of host memory: CUDA error 2"):
        HostMemory(PAGE + 1, pinned=True)


def test_copies_of_storages_lie_in_locked_memory_that_is_used_again(monkeypatch, runtime):
    monkeypatch.setattr(offload, "HostMemory", lambda nbytes, *, pinned: HostMemory(nbytes, pinned=True))
    tensors = [torch.randn(3000), torch.randn(7).to(torch.bfloat16)]
    before = [tensor.clone() for tensor in tensors]
    copies = HostCopies()
    for _ in range(2):
        copies.take(tensors)
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
        assert sorted(runtime.locked.values()) == [PAGE, 3 * PAGE]
        copies.give_back()
        assert all(torch.equal(now, then) for now, then in zip(tensors, before, strict=True))
