"""Transformer Engine's modules: an update in FP8, and weights of a converted checkpoint."""

import os

import pytest
from family_updates import updates
from loaded_models import same_weights
from machine import on_gpu
from ranks import run_ranks
from slimrl_tools.convert.hf_to_megatron import hf_to_megatron
from slimrl_tools.convert.options import Options
from small_models import small_model

from slimrl import device
from slimrl.config.env_vars import FP8_SCALES
from slimrl.config.schema.precision import Fp8Scaling, Precision
from slimrl.config.schema.trainer import LoraConfig, ParallelConfig

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(on_gpu() and not device.has_transformer_engine(), reason="needs Transformer Engine"),
]

STEPS = 3
SIZES = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "moe_intermediate_size": 128}
"""Multiples of a tile of FP8"""
LOSS_RELATIVE = 0.05
"""Between updates in FP8 and in bf16, of one model on the same data."""


@pytest.mark.proves("training in block FP8 through Transformer Engine follows training in bf16")
def test_updates_in_fp8_follow_those_in_bf16(tmp_path, figure, monkeypatch):
    monkeypatch.setitem(os.environ, FP8_SCALES, "1")
    path = small_model("qwen3_moe", tmp_path / "hf", **SIZES)
    # A CPU emulates it.
    block_fp8 = {"fp8": Fp8Scaling.blockwise, "fp8_emulation": not on_gpu()}
    cases = [{"precision": Precision.bf16, **settings} for settings in ({}, block_fp8)]
    plain, fp8 = (run_ranks(updates, 1, path, settings, range(STEPS), timeout_s=120)[0][0] for settings in cases)
    assert fp8 == pytest.approx(plain, rel=LOSS_RELATIVE)
    assert fp8 != plain
    figure("losses in bf16 " + ", ".join(f"{loss:.3f}" for loss in plain))
    figure("losses in FP8  " + ", ".join(f"{loss:.3f}" for loss in fp8))


@pytest.mark.proves("adapters learn on Megatron's layers with Transformer Engine's attention")
def test_adapters_start_from_the_model_of_transformer_engine_and_learn(tmp_path, figure):
    path = small_model("qwen3_moe", tmp_path / "hf", **SIZES)
    cases = [{"precision": Precision.bf16, **settings} for settings in ({}, {"lora": LoraConfig(rank=8, alpha=64)})]
    # The same batch at each update
    plain, adapted = (run_ranks(updates, 1, path, settings, [0] * 4, timeout_s=120)[0][0] for settings in cases)
    assert adapted[0] == pytest.approx(plain[0], rel=0.01)
    assert adapted[-1] < adapted[0]
    figure("losses of the model " + ", ".join(f"{loss:.3f}" for loss in plain))
    figure("losses of adapters  " + ", ".join(f"{loss:.3f}" for loss in adapted))


@pytest.mark.proves("a converted checkpoint has what Transformer Engine's modules look for, `_extra_state` included")
def test_a_converted_checkpoint_loads_into_the_modules_of_this_machine(tmp_path):
    for name in ("qwen3_moe", "deepseek_v3"):
        hf = small_model(name, tmp_path / name)
        hf_to_megatron(hf, tmp_path / f"{name}-mc", ParallelConfig(), Options())
        run_ranks(same_weights, 1, hf, tmp_path / f"{name}-mc", {"one": ParallelConfig()}, timeout_s=120)
