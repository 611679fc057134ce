"""The host memory of a checkpoint's save: recorded allocations of a real one against what a plan counts."""

import weakref
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trainer_cases import Run, model_config, start, trainer_config

from megatron_patches import checkpointing
from slimrl.config.schema.precision import Precision
from slimrl.estimates.planner import save
from slimrl.estimates.planner.parameters import built_stages
from slimrl.estimates.planner.save import node_save_bytes, save_bytes
from slimrl.trainer.checkpointing import checkpoint
from slimrl.trainer.checkpointing.writing import storage_addresses
from slimrl.trainer.offload import weight_tensors

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

BF16 = Precision.bf16
WIDE = {"hidden_size": 256, "moe_ffn_hidden_size": 256, "ffn_hidden_size": 512, "kv_channels": 64}
"""Weights outweigh what a save allocates beside, such as names and metadata."""
CASES = {
    1: [{"precision": BF16}],
    2: [
        {"precision": BF16},
        {"precision": BF16, "expert": 2},
        {"precision": BF16, "tensor": 2, "sequence": True},
    ],
}


class Allocations(TorchDispatchMode):
    """The bytes of storages that torch made within the block and that live, and the most at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._watched: set[weakref.ref] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {id(storage) for storage in storages([args, kwargs])}
        made = function(*args, **(kwargs or {}))
        known = {id(watched()) for watched in self._watched}
        for storage in storages(made):
            if id(storage) not in given | known:
                self._watch(storage, storage.nbytes())
        return made

    def _watch(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        def freed(watched: weakref.ref) -> None:
            self._watched.remove(watched)
            self.held -= nbytes

        self._watched.add(weakref.ref(storage, freed))
        self.held += nbytes
        self.peak = max(self.peak, self.held)


def storages(tree: object) -> list[torch.UntypedStorage]:
    return [item.untyped_storage() for item in tree_leaves(tree) if isinstance(item, torch.Tensor)]


def record_save(rank, num_ranks, port, settings, folder):
    """Peak of a save, and whether this rank is the first of its groups."""
    trainer = trainer_config(num_ranks, **settings)
    layout = start(trainer, rank, num_ranks, port)
    run = Run(trainer, layout, None, model_config(**WIDE))
    run.optimizer.create_state()
    with Allocations() as allocations:
        writing = checkpoint.begin(Path(folder) / "saved", run.chunks, run.optimizer, layout, {})
        writing.stage(storage_addresses([*weight_tensors(run.chunks), *run.optimizer.tensors()]))
        writing.write()
        writing.finish()
    parts = run.optimizer._parts()
    return allocations.peak, tuple(part.data_parallel_group.rank() == 0 for part in parts)


@pytest.mark.parametrize(
    ("num_ranks", "settings"),
    [(num_ranks, settings) for num_ranks, cases in CASES.items() for settings in cases],
    ids=lambda value: value if isinstance(value, int) else " ".join(value),
)
def test_a_save_takes_what_is_planned(num_ranks, settings, tmp_path):
    assert save.PIECE_ELEMENTS == checkpointing.PIECE_ELEMENTS
    trainer = trainer_config(num_ranks, **settings)
    (stage,) = built_stages(trainer, model_config(**WIDE))
    found = run_ranks(record_save, num_ranks, settings, str(tmp_path), timeout_s=250)
    for measured, first in found:
        assert measured == pytest.approx(save_bytes(stage, trainer, first), rel=0.05)
    planned = node_save_bytes(stage, trainer, num_ranks)
    assert planned == sum(save_bytes(stage, trainer, first) for _, first in found)
