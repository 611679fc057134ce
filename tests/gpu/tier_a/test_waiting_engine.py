"""An engine copies what came in a round while a kernel that receives the next one spins on the same GPU."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from engine_ranks import OnlyRank
from machine import choose, cycles_per_s, on_gpu, spin
from ranks import run_ranks

from slimrl import device
from slimrl.data.model_weights import GroupSpec
from slimrl.data.peer_messages import Entry, Message
from slimrl.engines.plugin import peer_receiver
from slimrl.engines.plugin.kept_tensors import KeptRegion
from slimrl.engines.plugin.peer_receiver import PeerReceiver
from slimrl.resync.p2p.peer_group import Move, PeerGroup, serve_store

SPIN_S = 8.0
SPIN_ON_CPU_S = 2.0
SIZE = 1 << 18
RECEIVER, SENDER = 0, 1


class SpinningNccl:
    """ProcessGroupNCCL for two members on one GPU, which NCCL refuses: sender and receiver are threads here.

    The receiver's kernel of round 1 spins before it copies.
    """

    sent: list[torch.Tensor]
    received: list[float]

    class Options(SimpleNamespace):
        def __init__(self):
            super().__init__(config=SimpleNamespace())

    def __init__(self, keys, member, size, options):
        self._begun = 0

    def allreduce(self, tensors, options):
        return SimpleNamespace(wait=lambda limit: None)

    def _start_coalescing(self):
        """Each launch has one message here."""

    def send(self, tensors, peer, tag):
        copy = tensors[0].clone()
        device.finish_queued_work()
        SpinningNccl.sent.append(copy)
        self._work = SimpleNamespace(wait=lambda limit: None)

    def recv(self, tensors, peer, tag):
        number, self._begun = self._begun, self._begun + 1
        while len(SpinningNccl.sent) <= number:
            time.sleep(0.01)

        def kernel():
            if number == 1:
                spin(choose(SPIN_S, SPIN_ON_CPU_S))
            tensors[0].copy_(SpinningNccl.sent[number])

        # Without a GPU a thread stands for the stream.
        stream = threading.Thread(target=(lambda: None) if on_gpu() else kernel)
        stream.start()
        if on_gpu():
            kernel()

        def wait(limit: timedelta) -> None:
            stream.join()
            device.finish_queued_work()
            SpinningNccl.received.append(time.monotonic())

        self._work = SimpleNamespace(wait=wait)

    def _end_coalescing(self):
        return self._work

    def abort(self):
        """No communicator."""


def copy_while_a_kernel_spins(rank, num_ranks, port):
    """Seconds until round 0 was copied, and how long after that the kernel of round 1 ended."""
    SpinningNccl.sent, SpinningNccl.received = [], []
    dist.ProcessGroupNCCL = SpinningNccl
    if on_gpu():
        torch.cuda.set_device(0)
        cycles_per_s()
    else:
        torch.cuda.Stream = lambda: SimpleNamespace(synchronize=lambda: None)
        torch.cuda.stream = lambda stream: nullcontext()
        torch.cuda.current_device = lambda: 0
    values = [torch.full((SIZE,), float(number), device=device.compute_device()) for number in (1, 2)]
    store = serve_store("127.0.0.1", 60.0)
    spec = GroupSpec(
        name="spinning", address="127.0.0.1", port=store.port, world_size=2, backend="nccl", timeout_s=60.0
    )
    box = ((0, SIZE),)
    rounds = [
        (
            Message(
                source=SENDER, target=RECEIVER, ranks=(RECEIVER,), entries=(Entry(f"w{number}", "float32", box),),
                nbytes=4 * SIZE,
            ),
        )
        for number in (0, 1)
    ]  # fmt: skip
    memory = {f"w{number}": torch.zeros_like(values[0]) for number in (0, 1)}
    regions = {name: [KeptRegion(box, value)] for name, value in memory.items()}
    copied: list[float] = []
    original = peer_receiver.place

    def place(*given):
        original(*given)
        device.finish_queued_work()
        copied.append(time.monotonic())

    peer_receiver.place = place

    def send_both():
        if on_gpu():
            torch.cuda.set_device(0)
        group, deadline = PeerGroup(spec, SENDER), time.monotonic() + 60
        for number, value in enumerate(values):
            announced = group.tell([RECEIVER], [[1, number, value.nbytes]], deadline)
            assert group.told([RECEIVER], 1, deadline) == [[number]]
            announced.wait()
            group.start([Move(RECEIVER, value.view(torch.uint8), sends=True)], deadline).wait()
        return group

    receiver = PeerReceiver(spec, OnlyRank(), {"target": rounds}, None)
    device.finish_queued_work()
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send_both)
        start = time.monotonic()
        receiver.receive("target", 1, regions)
        group = sending.result(60)
    assert all(torch.equal(memory[f"w{number}"], values[number]) for number in (0, 1))
    receiver.close()
    group.drop()
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(20)
    return copied[0] - start, SpinningNccl.received[1] - copied[0]


@pytest.mark.proves("an engine that copies waits for no kernel of the network, so the two cannot block each other")
def test_an_engine_copies_a_round_while_the_kernel_of_the_next_one_waits(figure):
    ((first, after),) = run_ranks(copy_while_a_kernel_spins, 1, timeout_s=90)
    whole = choose(SPIN_S, SPIN_ON_CPU_S)
    assert first < whole / 2, "the copy waited for the kernel"
    assert after > whole / 4
    figure(f"copied after {first * 1000:.0f} ms while a kernel ran for {whole:g} s; the next round {after:.1f} s later")
