"""What follows from the hardware that is there."""

import importlib.util

import pytest
import torch

from slimrl import device


@pytest.fixture
def machine(monkeypatch):
    """Makes this process see so many GPUs of a compute capability; gives those that it was bound to."""
    bound: list[int] = []

    def of(gpus: int, capability: tuple[int, int] = (9, 0), *, engine: bool = True) -> list[int]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: gpus - 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.cuda, "set_device", bound.append)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if engine else None)
        return bound

    return of


def test_without_a_gpu_everything_is_on_the_cpu(machine):
    bound = machine(0)
    device.select_device(3)
    assert bound == []
    assert (device.device_type(), device.compute_device(), device.collective_backend()) == (
        "cpu", torch.device("cpu"), "gloo",
    )  # fmt: skip
    assert not device.computes_block_fp8()
    assert not device.has_transformer_engine()


def test_ranks_are_dealt_to_the_gpus_that_they_see(machine):
    bound = machine(4)
    for rank in (0, 3, 4, 9):
        device.select_device(rank)
    assert bound == [0, 3, 0, 1]
    assert (device.device_type(), device.compute_device(), device.collective_backend()) == (
        "cuda", torch.device("cuda", 3), "nccl",
    )  # fmt: skip


@pytest.mark.parametrize(("capability", "packs"), [((9, 0), False), ((10, 0), True), ((12, 0), True)])
def test_engine_weights_are_packed_from_capability_10_on(machine, capability, packs):
    machine(1, capability)
    assert device.packs_engine_weights() is packs
    machine(0, capability)
    assert device.packs_engine_weights() is False


@pytest.mark.parametrize(("capability", "computes"), [((8, 0), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)])
def test_block_fp8_is_computed_from_capability_8_9_on(machine, capability, computes):
    machine(1, capability)
    assert device.computes_block_fp8() is computes


def test_layers_of_transformer_engine_need_a_gpu_and_the_package(machine):
    machine(1)
    assert device.has_transformer_engine()
    machine(1, engine=False)
    assert not device.has_transformer_engine()
