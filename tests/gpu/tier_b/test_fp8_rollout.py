"""Engines in block FP8, sent weights that each resync quantises."""

import pytest
from cli_runs import make_workspace, succeed
from machine import choose
from slimrl_tools.derive.quantize import quantization
from slimrl_tools.derive.rewrite import write_checkpoint
from slimrl_tools.toy.toy import ToySize
from toy_runs import RECIPE, RUN_S, assert_verified

from slimrl.checkpoints.safetensors_folder import SafetensorsFolder
from slimrl.models.hf_config import FP8_BLOCK, read_hf_config

pytestmark = pytest.mark.timeout(400)

MISMATCH_NAT = 0.5
STEPS = 2


@pytest.mark.proves("quantisation at each resync gives an engine that computes in FP8 what verification expects")
def test_a_run_trains_plain_weights_for_an_engine_in_block_fp8(tmp_path, figure):
    size = choose(
        ToySize(layers=2, hidden=256, head_dim=64, moe_intermediate=128),
        ToySize(layers=2, hidden=64, moe_intermediate=64),
    )
    workspace = make_workspace(tmp_path, size=size)
    with SafetensorsFolder(tmp_path / "model") as plain:
        write_checkpoint(quantization(plain, choose(FP8_BLOCK, (16, 16)), []), tmp_path / "fp8", resume=False)
    settings = (
        "run.name=fp8", f"model.path={tmp_path / 'fp8'}", f"steps={STEPS}", "resync.verify=full",
        f"algorithm.max_logprob_mismatch={MISMATCH_NAT}",
    )  # fmt: skip
    succeed("train", RECIPE, *workspace.overrides(*settings), timeout_s=RUN_S)
    folder = workspace.run_folder("fp8")
    *_, last = assert_verified(folder, STEPS, mismatch=MISMATCH_NAT)
    assert "quantization_config" not in read_hf_config(folder.export)
    figure(f"mismatch of log-probs {last['mismatch/logprob_abs_mean']:.3f} nat, resync {last['resync/seconds']:.2f} s")
