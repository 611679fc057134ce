"""Copies of weights in FP8, which Transformer Engine keeps in its modules, are there in training alone, and planned."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from slimrl.config.schema.precision import Fp8Scaling
from slimrl.config.schema.trainer import OptimizerConfig, TrainerConfig
from slimrl.data.training import MemoryPart
from slimrl.estimates.planner.memory import ALONE, COLOCATED, TOGETHER, TRAIN, keeps_fp8_copies
from slimrl.trainer.offload import Offload


class Chunk(nn.Module):
    """As a model chunk of Transformer Engine's layers, without buffers for gradients."""

    buffers = expert_parallel_buffers = ()  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.engine_layer, self.own_layer = nn.Linear(2, 2), nn.Linear(2, 2)
        self.engine_layer._fp8_workspaces = {"weight": torch.ones(2, 2)}

    def offload_grad_buffers(self, **options: bool) -> None: ...


@pytest.mark.parametrize("part", MemoryPart)
def test_copies_go_with_what_only_training_needs(part):
    chunk = Chunk()
    Offload([chunk], SimpleNamespace(tensors=lambda: [])).release([part])
    assert bool(chunk.engine_layer._fp8_workspaces) == (part is MemoryPart.optimizer)


def test_a_plan_has_copies_where_a_rank_keeps_gradients():
    for sets in (*ALONE.values(), *TOGETHER.values(), *COLOCATED.values()):
        assert all(("fp8_weights" in held) <= ("gradients" in held) for held in sets)


@pytest.mark.parametrize(
    ("scaling", "emulated", "kept"),
    [("off", False, False), ("blockwise", False, True), ("tensorwise", False, True), ("tensorwise", True, False)],
)
def test_a_plan_has_copies_where_transformer_engine_trains_in_fp8(scaling, emulated, kept):
    trainer = TrainerConfig(
        fp8=Fp8Scaling(scaling), fp8_emulation=emulated, max_tokens_per_rank=1, optimizer=OptimizerConfig(lr=0.0)
    )
    assert keeps_fp8_copies(trainer) is kept
    assert "fp8_weights" in TRAIN
