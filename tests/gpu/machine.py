"""Where the suite runs: on a GPU at full size, or on a CPU with small sizes so that every line is executed."""

import functools
import os
import time
from collections.abc import Callable

import torch

from slimrl import device

ON_CPU = "SLIMRL_GPU_TESTS_ON_CPU"
"""Environment variable: 1 runs the tests on a machine without a GPU instead of skipping them."""


def on_gpu() -> bool:
    return device.device_type() == "cuda"


def choose[T](gpu: T, cpu: T) -> T:
    """A size of the test, by where it runs."""
    return gpu if on_gpu() else cpu


def missing_gpus(needed: int) -> str:
    """Why a test that needs so many GPUs is skipped here; empty if it runs."""
    present = torch.cuda.device_count() if on_gpu() else 0
    if present >= needed or (not present and os.environ.get(ON_CPU) == "1"):
        return ""
    return f"needs {needed} CUDA device{'s' if needed > 1 else ''}, here are {present}"


def name_of_device() -> str:
    """For the head of the table."""
    if not on_gpu():
        return "on a CPU: of a GPU, nothing"
    return f"on {torch.cuda.device_count()} x {torch.cuda.get_device_name()}, torch {torch.__version__}"


def spin(seconds: float) -> None:
    """Keep the current stream busy; a CPU has none, so there the thread waits."""
    if on_gpu():
        torch.cuda._sleep(int(seconds * cycles_per_s()))
    else:
        time.sleep(seconds)


@functools.cache
def cycles_per_s() -> float:
    """Clock rate, measured with a spinning kernel. Call it before a test that must not wait for the measurement."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cycles = 10**8
    torch.cuda._sleep(cycles)
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return cycles / (start.elapsed_time(end) / 1000)


def seconds_of(call: Callable[[], object], repeats: int = 3) -> float:
    """The fastest of some calls, each with the work that it queues; the first one does not count."""
    times = []
    for _ in range(repeats + 1):
        device.finish_queued_work()
        start = time.perf_counter()
        call()
        device.finish_queued_work()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def copy_gb_per_s(nbytes: int) -> float:
    """Bytes that a copy within the device's memory moves, each counted once."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device.compute_device())
    target = torch.empty_like(source)
    return nbytes / 1e9 / seconds_of(lambda: target.copy_(source))
