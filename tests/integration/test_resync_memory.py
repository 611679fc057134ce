"""What a resync takes of memory besides the weights: as much for a large model as for a small one.

The trainer's ranks are real, and measured from the outside of torch: anonymous memory of the processes, and their files
in /dev/shm, which are counted once.
"""

import ctypes
import gc
import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from memory_engine import MemoryEngine
from ranks import run_ranks

from slimrl.checkpoints.safetensors_file import spec_bytes
from slimrl.checkpoints.versions.manifest import read_manifest
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.resync import ResyncConfig, TransportName, VerifyMode
from slimrl.config.schema.trainer import OptimizerConfig, ParallelConfig, TrainerConfig
from slimrl.data.peer_messages import ALIGNMENT
from slimrl.engines.plugin.peer_receiver import PeerReceiver
from slimrl.models.hf_config import read_hf_config
from slimrl.observability.memory import MemoryWatch
from slimrl.quantization.fp8 import BlockFp8
from slimrl.resync.p2p.demand import sent_tensors
from slimrl.resync.session import ResyncSession
from slimrl.resync.transform import quantize_transform
from slimrl.toys.sized_toy import sized_config, write_sized_toy
from slimrl.trainer.worker import TrainerWorker

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

MB = 1_000_000
M_MMAP_THRESHOLD = -3
"""As in malloc.h: from this size on memory is mapped for each allocation, and unmapped when it is freed"""
BUCKET_BYTES = 8 * MB
SLACK_BYTES = 6 * MB
"""What Python and the C library's allocator take for the messages of a resync, on two ranks together."""
HASHING_BYTES = 24 * MB
"""The same for fingerprints, those of the engine included, which lives in one of the two ranks here."""
QUANTISING_BYTES = 6 * MB
"""The same for block FP8"""
ROUNDING_BYTES = 24 * MB
"""And for rounding to FP8 and back, by way of a matrix in FP8"""
TIMEOUT_S = 60.0
TRAINER = TrainerConfig(
    num_ranks=2,
    parallel=ParallelConfig(expert=2),
    precision=Precision.bf16,
    max_tokens_per_rank=64,
    optimizer=OptimizerConfig(lr=1e-3),
)


@dataclass(frozen=True)
class Case:
    """A way of sending, and what it may take besides buffers of the size that the report names."""

    transport: TransportName = TransportName.ipc
    verify: VerifyMode = VerifyMode.off
    fp8_engines: bool | None = None
    """None: nothing is quantised"""
    slack_bytes: int = SLACK_BYTES

    @property
    def name(self) -> str:
        kind = {None: "plain", True: "fp8", False: "rounded"}[self.fp8_engines]
        return f"{self.transport.value}-{self.verify.value}-{kind}"

    @property
    def buffers(self) -> int:
        """Buffers of a bucket's size. With `ipc` the slots of the only receiver; with `p2p` those of each trainer rank
        and of the engine, which lives here too; otherwise two slots of rank 0."""
        return {TransportName.ipc: 1, TransportName.p2p: 3}.get(self.transport, 2)

    @property
    def planned(self) -> int:
        """Those of the trainer alone"""
        return 1 if self.transport in (TransportName.ipc, TransportName.p2p) else self.buffers


PLAIN = Case()
PEERS = Case(transport=TransportName.p2p, verify=VerifyMode.full, slack_bytes=SLACK_BYTES + HASHING_BYTES)
CASES = [
    Case(verify=VerifyMode.full, slack_bytes=SLACK_BYTES + HASHING_BYTES),
    Case(verify=VerifyMode.full, fp8_engines=True, slack_bytes=SLACK_BYTES + HASHING_BYTES + QUANTISING_BYTES),
    Case(verify=VerifyMode.full, fp8_engines=False, slack_bytes=SLACK_BYTES + HASHING_BYTES + ROUNDING_BYTES),
    PEERS,
    Case(transport=TransportName.disk),
    Case(transport=TransportName.delta, slack_bytes=SLACK_BYTES + 16 * MB),
]


class FolderEngine(MemoryEngine):
    """Reads versions in folders and keeps nothing of them."""

    def load_version(self, folder, local_dir):
        """Reloading is another process's work; the version is whole, or it would not have this name."""
        self.seen = sum(spec_bytes(stored.spec) for stored in read_manifest(Path(folder)).tensors.values())


class PeerEngine(MemoryEngine):
    """Receives over `p2p`."""

    _receiver: PeerReceiver | None = None

    def join_group(self, group, rounds, fed):
        alone = SimpleNamespace(rank=0, size=1, per_node=1)
        self._receiver = PeerReceiver(group, alone, {model.value: each for model, each in rounds[0].items()}, fed)

    def receive(self, group, model, version):
        self._receiver.receive(model.value, version, self.regions)
        self.seen += self._receiver.received_bytes
        return [self._receiver.received_bytes]


ENGINES = {TransportName.ipc: MemoryEngine, TransportName.p2p: PeerEngine}


def give_back_freed_memory() -> None:
    """What loading left behind goes back to the system now, not while a resync is measured, where it would hide as much
    of what the resync takes. From now on freed tensors go back at once: what the C library keeps of them is not in use,
    and quantising takes and frees blocks of many sizes.
    """
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)
    assert libc.mallopt(M_MMAP_THRESHOLD, 1 << 18) == 1


def resync_twice(rank, world_size, port, model: Path, case: Case) -> tuple[int, int, int, int]:
    """(memory that this rank took; on rank 0 bytes that the engine read, bytes sent, bytes of the plan's buffers)."""
    worker = TrainerWorker(
        TRAINER, model, seed=0, rank=rank, world_size=world_size, meeting=f"tcp://127.0.0.1:{port}",
        total_updates=1,
    )  # fmt: skip
    worker.load_hf()
    config = ResyncConfig(
        transport=case.transport, bucket_bytes=BUCKET_BYTES, verify=case.verify, timeout_s=TIMEOUT_S,
        dir=str(model.parent / "versions"), local_dir=str(model.parent / "local"), keep=1,
    )  # fmt: skip
    transform = None
    if case.fp8_engines is not None:
        hf_config = {**worker.hf_config, "quantization_config": BlockFp8().as_config()}
        weight_map = worker.family.weight_map(worker.hf_config)
        transform = quantize_transform(hf_config, weight_map, fp8_engines=case.fp8_engines)
    # All ranks together.
    source = worker.weight_source()
    specs = []
    if rank == 0 and case.transport in ENGINES:
        specs = [tensor.spec for tensor in sent_tensors(source.layout(), transform)]
    engine = ENGINES.get(case.transport, FolderEngine)("engine 0", "", specs)
    give_back_freed_memory()
    with MemoryWatch([os.getpid()]) as memory:
        session = ResyncSession(
            source, [engine], config, rank=rank, run_id=f"memory-{model.name}",
            model_dir=model, transform=transform,
        )  # fmt: skip
        reports = [session.run(version) for version in (1, 2)]
    session.close()
    dist.barrier()
    worker.close()
    if rank:
        return memory.extra_bytes, 0, 0, 0
    assert reports[1].mismatching == ()
    return memory.extra_bytes, engine.seen, reports[1].bytes, reports[1].peak_extra_bytes


def extra_bytes(folder: Path, megabytes: int, case: Case) -> int:
    """Extra bytes that all ranks together take; the engine has read the whole model."""
    model = folder / f"{megabytes}"
    config = sized_config("qwen3_moe", megabytes * MB, "bfloat16", TRAINER.parallel)
    nbytes = write_sized_toy(config, model, 0)
    assert read_hf_config(model) == config
    results = run_ranks(resync_twice, 2, model, case, timeout_s=200)
    taken, seen, sent, planned = (sum(values) for values in zip(*results, strict=True))
    assert seen == sent
    assert sent < nbytes if case.fp8_engines else sent == nbytes
    # Each message begins at a multiple of ALIGNMENT.
    assert planned <= case.planned * BUCKET_BYTES + 100 * ALIGNMENT
    # What is measured holds at least the buffers themselves, or it would measure nothing.
    assert taken >= planned
    return taken


@pytest.mark.parametrize(
    ("sizes", "case"),
    [
        pytest.param((64, 128), PLAIN, id="plain"),
        pytest.param((64, 128), PEERS, id="p2p"),
        pytest.param((250, 1000), PLAIN, id="large", marks=pytest.mark.full),
        *(pytest.param((250, 1000), case, id=case.name, marks=pytest.mark.full) for case in CASES),
    ],
)
def test_a_resync_takes_its_buckets_whatever_the_size_of_the_model(tmp_path, sizes, case):
    small, large = (extra_bytes(tmp_path, size, case) for size in sizes)
    bound = case.buffers * BUCKET_BYTES + case.slack_bytes
    assert max(small, large) < bound
    assert abs(large - small) < case.slack_bytes
