"""An engine loads a bucket while a kernel that receives the next one spins on the same GPU."""

import base64
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from engine_process import Weights
from engine_ranks import OnlyRank
from machine import choose, cycles_per_s, on_gpu, spin
from ranks import run_ranks

from slimrl import device
from slimrl.data.model_weights import GroupSpec, TensorPart, TensorSpec
from slimrl.engines.plugin.bucket_loader import leave_group, open_payload, received_payload, update
from slimrl.resync.ipc.broadcast_group import BroadcastGroup, serve_store

SPIN_S = 8.0
SPIN_ON_CPU_S = 2.0


class SpinningNccl:
    """ProcessGroupNCCL for two members on one GPU, which NCCL refuses: sender and receiver are threads here.

    The receiver's kernel of bucket 1 spins before it copies.
    """

    Options = SimpleNamespace
    sent: list[torch.Tensor]
    received: list[float]

    def __init__(self, keys, rank, size, options):
        self.rank = rank

    def broadcast(self, tensors, options):
        if self.rank == 0:
            copy = tensors[0].clone()
            device.finish_queued_work()
            SpinningNccl.sent.append(copy)
            return SimpleNamespace(wait=self._wait)
        number = len(SpinningNccl.received)
        while len(SpinningNccl.sent) <= number:
            time.sleep(0.01)
        if number == 1:
            spin(choose(SPIN_S, SPIN_ON_CPU_S))
        tensors[0].copy_(SpinningNccl.sent[number])
        return SimpleNamespace(wait=self._received)

    def _wait(self, timeout: timedelta) -> None:
        device.finish_queued_work()

    def _received(self, timeout: timedelta) -> None:
        device.finish_queued_work()
        SpinningNccl.received.append(time.monotonic())

    def abort(self):
        """No communicator."""


def load_while_a_kernel_spins(rank, num_ranks, port):
    """Seconds of the loading of buckets 0 and 1, and how long after the first one the kernel of the second ended."""
    SpinningNccl.sent, SpinningNccl.received = [], []
    dist.ProcessGroupNCCL = SpinningNccl
    if on_gpu():
        torch.cuda.set_device(0)
        cycles_per_s()
    else:
        torch.cuda.Stream = lambda: SimpleNamespace(synchronize=lambda: None)
        torch.cuda.stream = lambda stream: nullcontext()
    values = [torch.full((1 << 18,), float(number), device=device.compute_device()) for number in (1, 2)]
    store = serve_store("127.0.0.1", 2, 60.0)
    spec = GroupSpec(
        name="spinning", address="127.0.0.1", port=store.port, world_size=2, backend="nccl",
        bucket_bytes=values[0].nbytes, timeout_s=60.0,
    )  # fmt: skip
    model, only = Weights(), OnlyRank()

    def tell(payload):
        assert update(model, pickle.loads(base64.b64decode(payload)), only) == (True, "Success")

    def send_both():
        if on_gpu():
            torch.cuda.set_device(0)
        for value in values:
            group.announce(value.nbytes)
            group.broadcast(value.view(torch.uint8))
        group.announce(0)

    tell(open_payload(spec, 1))
    group = BroadcastGroup(spec, 0, store)
    device.finish_queued_work()
    seconds = []
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send_both)
        # The second bucket's kernel is under way.
        deadline = time.monotonic() + 30
        while len(SpinningNccl.sent) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.2)
        for number in (0, 1):
            part = TensorPart(
                spec=TensorSpec(name=f"w{number}", shape=(1 << 18,), dtype="float32"), start=0, stop=1 << 18, offset=0,
                nbytes=values[number].nbytes,
            )  # fmt: skip
            start = time.monotonic()
            tell(received_payload(spec.name, number, [part]))
            end = time.monotonic()
            seconds.append(end - start)
            if number == 0:
                first_loaded = end
        sending.result(60)
    assert all(torch.equal(model.loaded[f"w{number}"], values[number]) for number in (0, 1))
    assert leave_group(only)
    group.drop()
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(20)
    return seconds, SpinningNccl.received[1] - first_loaded


@pytest.mark.proves("an engine that loads waits for no kernel of the network, so the two cannot block each other")
def test_an_engine_loads_a_bucket_while_the_kernel_of_the_next_one_waits(figure):
    (((first, second), after),) = run_ranks(load_while_a_kernel_spins, 1, timeout_s=90)
    whole = choose(SPIN_S, SPIN_ON_CPU_S)
    assert first < whole / 4, "update() waited for the kernel"
    assert after > whole / 4
    figure(f"loaded in {first * 1000:.0f} ms while a kernel ran for {whole:g} s; the next bucket in {second:.1f} s")
