"""Weights from a trainer on one GPU to an engine on another one: by NCCL, and through memory of a GPU it cannot see."""

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from engine_process import RemoteEngine, serve
from machine import choose, copy_gb_per_s, on_gpu
from ranks import run_ranks, start_method
from resync_engines import Source
from sent_weights import bucket_bytes, session, weights

from slimrl.config.schema.resync import TransportName

NUM_BUCKETS, NUM_VERSIONS = 8, 4
VISIBLE = "CUDA_VISIBLE_DEVICES"


@contextmanager
def engine_at(path: Path, gpu: int, load_s: float = 0.0) -> Iterator[None]:
    """An engine's process on GPU number `gpu` of those that it sees."""
    process = multiprocessing.get_context(start_method()).Process(target=serve, args=(path, gpu, load_s))
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join(10)


def send_versions(rank, num_ranks, port, path, transport):
    """(buckets or rounds, bytes, seconds of the fastest version's copying); the trainer is on the first GPU."""
    if on_gpu():
        torch.cuda.set_device(0)
    engine, source = RemoteEngine("engine 0", path, timeout_s=60.0), Source(weights(NUM_BUCKETS))
    engine.keep(source.weights)
    sender = session(source, [engine], transport)
    seconds = []
    for version in range(1, NUM_VERSIONS + 1):
        for weight in source.weights.values():
            weight.mul_(-1).add_(1)
        report = sender.run(version)
        assert report.mismatching == ()
        assert report.failed_engines == {}
        for name, value in source.weights.items():
            assert (engine.ask("value", name) == value.float().cpu().numpy()).all(), name
        seconds.append(sum(report.stage_seconds.get(stage, 0.0) for stage in ("gather", "wait", "send")))
    sender.close()
    engine.close()
    return report.buckets, report.bytes, min(seconds)


@pytest.mark.proves("messages by NCCL between a trainer and an engine, also one that copies slowly")
@pytest.mark.parametrize("load_s", [0.0, 0.3], ids=["fast engine", "slow engine"])
def test_versions_are_sent_to_an_engine_on_another_gpu(tmp_path, figure, load_s):
    with engine_at(tmp_path / "engine", 1, choose(load_s, load_s / 10)):
        ((rounds, nbytes, seconds),) = run_ranks(
            send_versions, 1, tmp_path / "engine", TransportName.p2p, timeout_s=150
        )
    # A rank has two slots, each half of a bucket.
    assert rounds >= nbytes / (bucket_bytes() // 2) > 2
    figure(f"send and copy {nbytes / 1e9 / seconds:.2f} GB/s, a copy within a GPU {copy_gb_per_s(bucket_bytes()):.1f}")


@pytest.mark.proves("CUDA IPC between processes of which each sees another GPU alone, as Ray's actors do")
def test_an_engine_loads_from_memory_of_a_gpu_that_it_cannot_see(tmp_path, figure, monkeypatch):
    first, second, *_ = [*filter(None, os.environ.get(VISIBLE, "").split(",")), "0", "1"]
    monkeypatch.setenv(VISIBLE, second)
    with engine_at(tmp_path / "engine", 0):
        monkeypatch.setenv(VISIBLE, first)
        ((rounds, nbytes, seconds),) = run_ranks(
            send_versions, 1, tmp_path / "engine", TransportName.ipc, timeout_s=150
        )
    assert rounds >= nbytes / (bucket_bytes() // 2) > 2
    figure(f"resync across GPUs {nbytes / 1e9 / seconds:.2f} GB/s")
