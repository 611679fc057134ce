"""A checkpoint that is written beside the training has the values of its begin, whatever changes meanwhile."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from slimrl_tools.toy.toy import ToySize, write_toy
from trainer_cases import trainer_config

from slimrl.checkpoints.digests import FileDigest
from slimrl.config.schema.precision import Precision
from slimrl.models.architecture import FACTS_FILE
from slimrl.trainer.build import unwrap
from slimrl.trainer.checkpointing.checkpoint import BY_RANK
from slimrl.trainer.offload import weight_tensors
from slimrl.trainer.worker import TrainerWorker

ON_HOST = {
    "optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0, "overlap_cpu_optimizer_d2h_h2d": True,
    "use_precision_aware_optimizer": True,
}  # fmt: skip

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


def digests(rank: int, world_size: int, port: int, hf: Path, out: Path, settings: dict):
    """Checksums of a checkpoint that was waited for, and of one during which everything changed."""
    worker = TrainerWorker(
        trainer_config(world_size, **settings), hf, seed=0, rank=rank, world_size=world_size,
        meeting=f"tcp://127.0.0.1:{port}", total_updates=10,
    )  # fmt: skip
    worker.load_hf()
    waited = worker.save_checkpoint(out / "waited")
    writing = worker.begin_checkpoint(out / "beside")
    buffers = [buffer for chunk in worker.chunks for buffer in unwrap(chunk).buffers()]
    with torch.no_grad():
        for tensor in [*weight_tensors(worker.chunks), *worker.optimizer.tensors(), *buffers]:
            if tensor.is_floating_point():
                tensor.add_(1.0)
    torch.rand(1)
    writing.write()
    beside = writing.finish()
    worker.close()
    names = [name for name in waited if name.endswith((".distcp", f"rng/{rank:05d}.pt"))]
    return {name: waited[name] for name in names}, {name: beside[name] for name in names}, len(buffers)


@pytest.mark.parametrize(("ranks", "settings"), [(1, {}), (2, {"expert": 2})])
def test_what_is_written_is_what_there_was_at_the_begin(ranks: int, settings: dict, tmp_path: Path):
    # A family whose routers have biases that change beside the optimizer.
    write_toy("glm4_moe", tmp_path / "hf", ToySize(layers=2, hidden=64, moe_intermediate=64), 0)
    for waited, beside, num_buffers in run_ranks(digests, ranks, tmp_path / "hf", tmp_path, settings, timeout_s=200):
        assert waited == beside
        assert len(waited) > 1
        assert num_buffers


def digests_of_two(rank: int, world_size: int, port: int, hf: Path, out: Path):
    """Checksums of a checkpoint that was waited for, and of two that were written at a time, each by its own thread."""
    worker = TrainerWorker(
        trainer_config(world_size), hf, seed=0, rank=rank, world_size=world_size,
        meeting=f"tcp://127.0.0.1:{port}", total_updates=10,
    )  # fmt: skip
    worker.load_hf()
    waited = worker.save_checkpoint(out / "waited")
    # Folders of two nodes: each rank makes its own.
    writings = [
        worker.begin_checkpoint(out / "disk"),
        worker.begin_checkpoint(out / f"memory_{rank}", leads=True),
    ]
    with ThreadPoolExecutor(2) as threads:
        for written in [threads.submit(writing.write) for writing in writings]:
            written.result()
    # Not in the order of their begin.
    memory, disk = (writing.finish() for writing in reversed(writings))
    worker.close()
    return waited, disk, memory, sorted(path.name for path in (out / f"memory_{rank}").rglob("*") if path.is_file())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_on_the_disk_and_one_in_memory_are_written_at_a_time(ranks: int, tmp_path: Path):
    write_toy("qwen3_moe", tmp_path / "hf", ToySize(layers=2, hidden=64, moe_intermediate=64), 0)
    found = run_ranks(digests_of_two, ranks, tmp_path / "hf", tmp_path, timeout_s=200)
    for waited, disk, memory, names in found:
        assert shards(waited) == shards(disk) == shards(memory)
        assert names == sorted(Path(name).name for name in memory)
    assert any(shards(waited) for waited, *_ in found)


def shards(digests: dict[str, FileDigest]) -> dict[str, FileDigest]:
    return {name: digest for name, digest in digests.items() if name.endswith(".distcp")}


def digests_through_memory(rank: int, world_size: int, port: int, hf: Path, out: Path, settings: dict):
    """The optimizer's tensors that did not come back from memory, all tensors that came back otherwise from the disk,
    and sizes and facts of the files in memory."""
    worker = TrainerWorker(
        trainer_config(world_size, **settings), hf, seed=0, rank=rank, world_size=world_size,
        meeting=f"tcp://127.0.0.1:{port}", total_updates=10,
    )  # fmt: skip
    worker.load_hf()
    worker.optimizer.create_state()
    change(worker, seed=0, step=7.0)
    writing = worker.begin_checkpoint(out / "memory", same_layout=True)
    worker.save_checkpoint(out / "disk")
    writing.write()
    memory = writing.finish()
    before, found = values(worker), {}
    for name in ("disk", "memory"):
        change(worker, seed=100, step=9.0)
        worker.load_checkpoint(out / name)
        found[name] = values(worker)
    # Buffers of weights have padding, which no checkpoint has.
    lost = [name for name in differing(before, found["memory"]) if name.startswith("optimizer")]
    sizes = {name: digest.bytes for name, digest in memory.items()}
    worker.close()
    return lost, differing(found["disk"], found["memory"]), sizes, json.loads((out / "memory" / FACTS_FILE).read_text())


def values(worker: TrainerWorker) -> dict[str, torch.Tensor]:
    """Copies of weights, main weights, moments and numbers of updates."""
    found = {f"weights {index}": tensor for index, tensor in enumerate(weight_tensors(worker.chunks))}
    found |= {f"optimizer {index}": tensor for index, tensor in enumerate(worker.optimizer.tensors())}
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def differing(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    assert left.keys() == right.keys()
    return [name for name in left if not torch.equal(left[name], right[name])]


def change(worker: TrainerWorker, seed: int, step: float) -> None:
    """Other main weights, moments and number of updates on each rank, and other weights, the same on all."""
    with torch.no_grad():
        for tensors, of_rank in ((worker.optimizer.tensors(), worker.layout.rank), (weight_tensors(worker.chunks), 0)):
            torch.manual_seed(seed + of_rank)
            for tensor in tensors:
                if tensor.is_floating_point():
                    tensor.uniform_(0.1, 1.0) if tensor.dim() else tensor.fill_(step)


@pytest.mark.parametrize(
    ("ranks", "settings", "by_rank"),
    [
        (1, {}, True),
        (2, {}, True),
        (2, {"expert": 2, "precision": Precision.bf16}, True),
        (1, {"megatron": ON_HOST, "precision": Precision.bf16}, False),
    ],
)
def test_what_comes_back_from_memory_is_what_there_was(ranks: int, settings: dict, by_rank: bool, tmp_path: Path):
    write_toy("qwen3_moe", tmp_path / "hf", ToySize(layers=2, hidden=64, moe_intermediate=64), 0)
    found = run_ranks(digests_through_memory, ranks, tmp_path / "hf", tmp_path, settings, timeout_s=200)
    for lost, otherwise, _, facts in found:
        assert (lost, otherwise) == ([], [])
        assert facts.get("distrib_optim_sharding_type") == (BY_RANK if by_rank else None)
    if by_rank:
        # No rank has gathered what others have: the first has the weights besides.
        states = [sum(size for name, size in sizes.items() if name.endswith(".distcp")) for _, _, sizes, _ in found]
        assert min(states) > 0.4 * max(states)
