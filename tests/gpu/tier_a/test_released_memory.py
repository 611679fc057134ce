"""A trainer's weights and optimizer go to the host and come back."""

import time
from pathlib import Path

import pytest
import torch
from machine import choose, copy_gb_per_s, on_gpu
from ranks import run_ranks
from trainer_cases import Run, gradient_bytes, model_config, optimizer_bytes, start, trainer_config, weight_bytes

from slimrl.config.schema.precision import Precision
from slimrl.data.training import MemoryPart
from slimrl.models.fingerprint import fingerprint
from slimrl.trainer.host_memory import whole_pages
from slimrl.trainer.layout.parallel import destroy_parallel
from slimrl.trainer.offload import Offload

ROUNDS = 3
SLACK_BYTES = 256 << 20
"""GPU memory that torch and cuBLAS may keep."""
SIZES = {"hidden_size": 1024, "kv_channels": 64, "moe_ffn_hidden_size": 1536}
"""2 GB of weights, main weights and moments."""


def held_tensors(run: Run) -> list[torch.Tensor]:
    return [parameter.detach() for chunk in run.chunks for parameter in chunk.parameters()] + list(
        run.optimizer.tensors()
    )


def resident_bytes() -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) << 10


def release_and_restore(rank, num_ranks, port, sizes):
    """(bytes released, seconds of the fastest release and restoration, bytes of host memory, growth of the process)."""
    trainer = trainer_config(1, precision=Precision.bf16)
    layout = start(trainer, rank, num_ranks, port)
    run = Run(trainer, layout, None, model_config(**sizes))
    offload = Offload(run.chunks, run.optimizer)
    run.update(0)
    resident, times = resident_bytes(), []
    for number in range(ROUNDS):
        held = weight_bytes(run) + optimizer_bytes(run)
        before = [fingerprint(tensor) for tensor in held_tensors(run)]
        begin = time.perf_counter()
        offload.release(MemoryPart)
        released = time.perf_counter()
        assert (weight_bytes(run), optimizer_bytes(run), gradient_bytes(run)) == (0, 0, 0)
        assert not on_gpu() or torch.cuda.memory_reserved() < SLACK_BYTES
        grown = resident_bytes() - resident
        again = time.perf_counter()
        offload.restore(MemoryPart)
        if on_gpu():
            torch.cuda.synchronize()
        times.append((released - begin, time.perf_counter() - again))
        assert [fingerprint(tensor) for tensor in held_tensors(run)] == before
        assert weight_bytes(run) + optimizer_bytes(run) == held
        result = run.update(number + 1)
        assert not result.skipped
        assert result.grad_norm > 0
    kept = [*offload._weights._kept.values(), *offload._state._kept.values()]
    host = sum(whole_pages(memory.tensor.numel()) if on_gpu() else memory.tensor.numel() for memory in kept)
    destroy_parallel()
    return held, tuple(map(min, zip(*times, strict=True))), host, grown


@pytest.mark.proves("a released trainer gives its GPU memory back and returns with the same bits, three times")
def test_released_weights_and_optimizer_return_bit_for_bit_and_take_no_more_host_memory_than_they_are(figure):
    sizes = SIZES if on_gpu() else {}
    ((held, (release_s, restore_s), host, grown),) = run_ranks(release_and_restore, 1, sizes, timeout_s=200)
    assert held <= host <= 1.1 * held
    assert not on_gpu() or grown <= 1.1 * held + SLACK_BYTES
    out, back = (held / 1e9 / seconds for seconds in (release_s, restore_s))
    copy = copy_gb_per_s(choose(1 << 30, 1 << 20))
    figure(f"{held / 1e9:.2f} GB leave at {out:.1f} GB/s and return at {back:.1f}; a copy within the device {copy:.0f}")
    figure(f"host memory: {host / held:.2f} times that")
