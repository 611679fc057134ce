"""What Transformer Engine cannot compute on this machine's GPU is said of the recipe, before anything starts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from slimrl_tools.toy.toy import write_toy

from slimrl import device
from slimrl.config.problems import Problem
from slimrl.config.schema.precision import Fp8Scaling
from slimrl.config.schema.trainer import TrainerConfig
from slimrl.runtime.checks.model_check import model_problems
from slimrl.toys.toy_configs import ToySize

SIZE = ToySize(layers=2, hidden=32, heads=2, kv_heads=2, head_dim=16, experts=2, moe_intermediate=16)


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("toy") / "qwen3_moe"
    write_toy("qwen3_moe", path, SIZE, 0)
    return path


def problems(
    toy: Path, capability: tuple[int, int], monkeypatch, *, devices: bool = True, engine: bool = True, **trainer: Any
) -> list[str]:
    monkeypatch.setattr(device, "device_type", lambda: "cuda")
    monkeypatch.setattr(device, "has_transformer_engine", lambda: engine)
    monkeypatch.setattr(device, "_is_installed", lambda name: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "X")
    recipe = SimpleNamespace(
        has_critic=False,
        deterministic=False,
        model=SimpleNamespace(path=str(toy), megatron=None),
        rollout=SimpleNamespace(max_trajectory_tokens=64),
        trainer=TrainerConfig(**trainer),
    )
    loaded = SimpleNamespace(
        recipe=recipe, command="sft", problem=lambda key, message: Problem(key=key, message=message)
    )
    return [f"{problem.key}: {problem.message}" for problem in model_problems(loaded, devices=devices)]


@pytest.mark.parametrize(
    ("capability", "trainer", "said"),
    [
        ((9, 0), {}, []),
        ((9, 0), {"fp8": Fp8Scaling.blockwise}, []),
        ((9, 0), {"fp8": Fp8Scaling.mxfp8}, ["trainer.fp8: mxfp8 needs 10.0 or more, below 12.0. X has compute"]),
        ((12, 0), {"fp8": Fp8Scaling.mxfp8}, ["trainer.fp8: mxfp8 needs 10.0 or more, below 12.0. X has compute"]),
        ((8, 0), {}, ["model.path: X has compute capability 8.0: before 9.0 Transformer Engine"]),
        (
            (8, 9),
            {"fp8": Fp8Scaling.blockwise},
            ["trainer.fp8: blockwise needs 9.0 or more. X has", "model.path: X has compute capability 8.9: before 9.0"],
        ),
    ],
)
def test_a_card_that_cannot_train_so_is_named(toy, monkeypatch, capability, trainer, said):
    found = problems(toy, capability, monkeypatch, **trainer)
    assert len(found) == len(said)
    assert all(line.startswith(start) for line, start in zip(found, said, strict=True)), found
    assert problems(toy, capability, monkeypatch, devices=False, **trainer) == []


@pytest.mark.parametrize("name", ["gradient_accumulation_fusion", "defer_embedding_wgrad_compute"])
@pytest.mark.parametrize("engine", [False, True])
def test_kernels_of_apex_need_apex_alone(toy, monkeypatch, name, engine):
    def said(apex: bool) -> list[str]:
        monkeypatch.setattr(device, "has_apex", lambda: apex)
        return problems(toy, (9, 0), monkeypatch, engine=engine, megatron={name: True})

    assert said(apex=True) == []
    assert said(apex=False) == [f"trainer.megatron.{name}: needs a GPU and apex (docs/install.md). Leave it out."]


def test_a_rounding_of_torch_s_needs_no_transformer_engine(toy, monkeypatch):
    given = {"disable_bf16_reduced_precision_matmul": True}
    assert problems(toy, (9, 0), monkeypatch, engine=False, megatron=given) == []
    given = {"moe_grouped_gemm": True}
    assert problems(toy, (9, 0), monkeypatch, engine=False, megatron=given) != []
