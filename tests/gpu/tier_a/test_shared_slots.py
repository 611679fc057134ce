"""Versions from a trainer's process to engines' processes on the same GPU, through shared buffers."""

import os
import re

import pytest
import torch
from engine_process import RemoteEngine, serve
from machine import choose, copy_gb_per_s, on_gpu
from ranks import run_ranks
from resync_engines import Source
from sent_weights import RUN_ID, bucket_bytes, session, weights

from slimrl.resync.ipc.allocator import forbid_expandable_segments
from slimrl.resync.ipc.shared_buffer import SHARED_MEMORY_DIR

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
SLACK_BYTES = 16 << 20
"""By which used memory of a GPU may change between two versions."""


def held_bytes() -> int:
    """Bytes in use: on a GPU those of all processes, else those of this suite's buffers in /dev/shm."""
    if on_gpu():
        free, total = torch.cuda.mem_get_info()
        return total - free
    return sum(path.stat().st_size for path in SHARED_MEMORY_DIR.glob(f"slimrl-{RUN_ID}-{os.getpid()}-*"))


def versions_to_engines(rank, num_ranks, port, folder, num_buckets, num_versions):
    """Rank 0 sends, ranks 1 to 3 are engines; 2 is killed half way, and 3 takes its place at the version after.

    Returns:
        (rounds sent, bytes of a version, seconds of the fastest version's copying) on rank 0.
    """
    if rank:
        return serve(folder / str(rank))
    if on_gpu():
        torch.cuda.set_device(0)
    places = (("engine 1", "1"), ("engine 2", "2"), ("engine 2", "3"))
    source = Source(weights(num_buckets))
    first, killed, spare = (RemoteEngine(name, folder / place).keep(source.weights) for name, place in places)
    engines, last, sent, held, seconds = [first, killed], num_versions // 2, 0, [], []
    sender = session(source, engines)
    for version in range(1, num_versions + 1):
        for weight in source.weights.values():
            weight.mul_(-1).add_(1)
        if version == last:
            killed.kill()
        report = sender.run(version)
        assert report.mismatching == ()
        assert list(report.failed_engines) == ([killed.name] if version == last else [])
        # A receiver has two slots, each half of a bucket.
        assert report.buckets >= report.bytes / (bucket_bytes() // 2)
        if version == last:
            engines = [first, spare]
            sender.use(engines)
        else:
            seconds.append(report.stage_seconds["gather"] + report.stage_seconds["send"])
        for engine in (first, engines[-1] if version != last else first):
            for name in (f"wide.{version % num_buckets}", f"narrow.{num_buckets - 1}"):
                expected = source.weights[name].float().cpu().numpy()
                assert (engine.ask("value", name) == expected).all(), (engine.name, name)
        sent += report.buckets
        held.append(held_bytes())
    # The first version allocates, and the one after the replacement does.
    for some in (held[1 : last - 1], held[last + 1 :]):
        assert max(some) - min(some) <= choose(SLACK_BYTES, 0), held
    # The engine that takes another one's place loads from where that did.
    assert first.ask("num_segments") == spare.ask("num_segments") == 2
    sender.close()
    assert on_gpu() or held_bytes() == 0
    for engine in (first, spare):
        engine.close()
    return sent, report.bytes, min(seconds)


@pytest.mark.proves("lifetime and order of buffers behind CUDA IPC; no memory is lost when an engine dies")
def test_engines_load_many_rounds_out_of_two_slots_and_one_is_killed_and_replaced(tmp_path, figure):
    num_buckets, num_versions = choose(20, 4), choose(10, 8)
    sent, nbytes, seconds = run_ranks(
        versions_to_engines, 4, tmp_path, num_buckets, num_versions, timeout_s=150, dying=[2]
    )[0]
    assert sent > num_buckets * num_versions
    figure(f"resync to two engines {nbytes / 1e9 / seconds:.2f} GB/s, a copy {copy_gb_per_s(bucket_bytes()):.1f} GB/s")


def with_expandable_segments(rank, num_ranks, port, folder):
    """Both processes inherit the setting, and remove it as the actors do."""
    if not on_gpu():
        os.environ[ALLOCATOR] = "expandable_segments:True"
    assert re.search("expandable_segments", os.environ[ALLOCATOR])
    forbid_expandable_segments(os.environ)
    assert ALLOCATOR not in os.environ
    if rank:
        return serve(folder / str(rank))
    if on_gpu():
        torch.cuda.set_device(0)
    source = Source(weights(3))
    engine = RemoteEngine("engine 1", folder / "1").keep(source.weights)
    sender = session(source, [engine])
    mismatching = [sender.run(version).mismatching for version in (1, 2)]
    expandable = [segment for segment in torch.cuda.memory_snapshot() if segment["is_expandable"]] if on_gpu() else []
    sender.close()
    engine.close()
    return mismatching, len(expandable)


@pytest.mark.proves("an inherited expandable_segments:True does not reach the memory that is shared")
def test_inherited_expandable_segments_are_refused_in_time(tmp_path, monkeypatch):
    monkeypatch.setenv(ALLOCATOR, "expandable_segments:True")
    results = run_ranks(with_expandable_segments, 2, tmp_path, timeout_s=120)
    assert results[0] == ([(), ()], 0)
