"""What follows from the hardware that is there."""

import importlib
import importlib.util
import os
import sys
from types import SimpleNamespace

import pytest
import torch

from slimrl import device
from slimrl.config.schema.precision import Fp8Scaling


def place(bus: int) -> SimpleNamespace:
    return SimpleNamespace(pci_domain_id=0, pci_bus_id=bus, pci_device_id=0)


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
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: place(0x17 + index))
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


@pytest.mark.parametrize(
    ("said", "allowed", "bound"),
    [
        ("0-2,8-9\n", range(16), {0, 1, 2, 8, 9}),
        ("5\n", range(16), {5}),
        # A container has some of the machine's CPUs.
        ("0-7\n", range(6, 12), {6, 7}),
        ("0-7\n", range(8, 12), None),
        ("\n", range(4), None),
        (None, range(4), None),
    ],
)
def test_a_rank_runs_on_the_cpus_near_its_gpu(machine, monkeypatch, tmp_path, said, allowed, bound):
    machine(4)
    monkeypatch.setattr(device, "_PCI_DEVICES", tmp_path)
    if said is not None:
        (tmp_path / "0000:1a:00.0").mkdir()
        (tmp_path / "0000:1a:00.0" / "local_cpulist").write_text(said)
    threads = {}
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(allowed))
    monkeypatch.setattr(os, "sched_setaffinity", threads.__setitem__)
    device.select_device(7)
    if bound is None:
        assert threads == {}
    else:
        assert os.getpid() in threads
        assert all(cpus == bound for cpus in threads.values())


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


@pytest.mark.parametrize("has", [device.has_transformer_engine, device.has_apex])
def test_kernels_of_a_package_need_a_gpu_and_the_package(machine, has):
    machine(1)
    assert has()
    machine(1, engine=False)
    assert not has()
    machine(0)
    assert not has()


def test_attention_of_packed_sequences_needs_hopper_or_flash_attention_2(machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
    installed = []
    monkeypatch.setattr(device, "_is_installed", lambda name: name in installed)
    machine(1, (9, 0))
    assert device.attention_problem() is None
    machine(1, (8, 9), engine=False)
    assert device.attention_problem() is None
    machine(1, (8, 9))
    assert str(device.attention_problem()).startswith("A100 has compute capability 8.9: before 9.0")
    installed.append("flash-attn")
    assert device.attention_problem() is None
    machine(0)
    assert device.attention_problem() is None


@pytest.mark.parametrize(
    ("scaling", "capability", "needs"),
    [
        ("off", (8, 0), None),
        ("tensorwise", (8, 0), "8.9"),
        ("delayed", (8, 9), None),
        ("blockwise", (8, 9), "9.0"),
        ("blockwise", (10, 0), None),
        ("blockwise", (12, 0), None),
        ("mxfp8", (9, 0), "10.0"),
        ("mxfp8", (10, 3), None),
        # Its products are not there for all layouts of operands.
        ("mxfp8", (12, 0), "10.0"),
    ],
)
def test_fp8_training_names_the_gpu_that_it_needs(machine, monkeypatch, scaling, capability, needs):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "X")
    machine(1, capability)
    found = device.fp8_problem(Fp8Scaling(scaling))
    assert (found is None) == (needs is None)
    below = ", below 12.0" if scaling == "mxfp8" else ""
    assert needs is None or str(found).startswith(f"{scaling} needs {needs} or more{below}. X has compute capability ")


def test_transformer_engine_that_is_there_but_broken_says_so(machine, monkeypatch, tmp_path):
    package = tmp_path / "transformer_engine"
    (package / "pytorch").mkdir(parents=True)
    # As the real one does.
    (package / "__init__.py").write_text("try:\n    from . import pytorch\nexcept ImportError:\n    pass\n")
    (package / "pytorch" / "__init__.py").write_text("raise ImportError('undefined symbol: _ZN3c10')\n")
    monkeypatch.syspath_prepend(tmp_path)
    machine(1)
    try:
        with pytest.raises(ValueError, match=r"cannot be imported: ImportError\('undefined symbol: _ZN3c10'\)"):
            device.load_transformer_engine()
        (package / "pytorch" / "__init__.py").write_text("")
        importlib.invalidate_caches()
        device.load_transformer_engine()
    finally:
        for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
            del sys.modules[name]
    machine(0)
    device.load_transformer_engine()
    assert "transformer_engine" not in sys.modules
