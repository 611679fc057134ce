"""Runs of the command with adapters: the loss falls, engines hold the merged weights, and PEFT loads the export."""

import json

import pytest
import torch
from cli_runs import RECIPES, make_workspace, succeed
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slimrl.observability.metrics import read_metrics

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(900)]

LORA = ["trainer.lora.rank=8", "trainer.lora.alpha=16"]
RUN_S = 400.0


def test_supervised_training_of_adapters_lowers_the_loss_and_leaves_other_weights(tmp_path):
    workspace = make_workspace(tmp_path)
    settings = [
        f"run.dir={tmp_path / 'runs'}", f"model.path={tmp_path / 'model'}", f"data.train={tmp_path / 'data/sft.jsonl'}",
        "steps=20", "trainer.optimizer.lr=1e-2", "trainer.optimizer.schedule=constant",
        "trainer.optimizer.warmup_updates=0", "tracking.wandb=disabled", *LORA,
    ]  # fmt: skip
    succeed("sft", str(RECIPES / "sft.yaml"), *settings, timeout_s=RUN_S)
    folder = workspace.run_folder("sft")
    losses = [step["sft/loss"] for step in read_metrics(folder.metrics) if "sft/loss" in step]
    assert losses[-1] < 0.9 * losses[0]
    before, after = (
        {name: value for file in path.glob("*.safetensors") for name, value in load_file(file).items()}
        for path in (tmp_path / "model", folder.export)
    )
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert changed == {name for name in before if "_proj." in name}
    config = json.loads((folder.export / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (8, 16.0)
    tokens_1T = torch.arange(40)[None]
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(folder.export, dtype=torch.float32)(tokens_1T).logits
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
        loaded = PeftModel.from_pretrained(base, folder.export / "adapter")(tokens_1T).logits
    torch.testing.assert_close(loaded, merged, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("family", "transport"),
    [("qwen3_moe", "ipc"), ("qwen3_moe", "p2p"), ("qwen3_vl_moe", "ipc"), ("gpt_oss", "p2p")],
)
def test_engines_of_a_run_hold_the_merged_weights(tmp_path, family, transport):
    workspace = make_workspace(tmp_path, family)
    settings = ["steps=2", f"resync.transport={transport}", "resync.verify=full", "trainer.optimizer.lr=1e-2"]
    settings += ["agent.parser=qwen25", *LORA]
    succeed("train", str(RECIPES / "gspo_calculator.yaml"), *workspace.overrides(*settings), timeout_s=RUN_S)
    steps = [step for step in read_metrics(workspace.run_folder("gspo").metrics) if step["step"] > 0]
    # A resync fails if a fingerprint differs; the engines sampled the second step with the first update's weights.
    assert len(steps) == 2
    assert all(step["mismatch/logprob_abs_mean"] < 1e-4 for step in steps)
    assert all(step["policy/grad_norm"] > 0 for step in steps)
