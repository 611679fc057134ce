"""Runs of SmolLM2-135M-Instruct: trainer and engine stay together, in each precision within its limit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from cli_runs import succeed
from real_model import real_model

from slimrl.observability.metrics import read_metrics
from slimrl.observability.run_folder import RunFolder

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(1200)]

RUN_S, QUANTIZE_S = 1000.0, 180.0
TOOLS = (sys.executable, "-m", "slimrl_tools.cli")
CASES = {"fp32": (20, 2e-5), "bf16": (20, 0.1), "block_fp8": (4, 0.3)}
"""Number of steps, and limit of `mismatch/logprob_abs_mean` in nats, by what engines compute in: at least twice the
largest that was measured. In block FP8, where the trainer computes in float32, it grew from 0.06 in the second step to
0.32 in the tenth. The policy's entropy grew too; whether that is the cause was not looked into."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return real_model(tmp_path_factory.mktemp("real"))[0]


def write_recipe(folder: Path, model: Path, precision: str, steps: int, limit: float) -> Path:
    sums = [{"prompt": f"What is {a} + {b}?", "label": str(a + b)} for a in range(2, 10) for b in range(2, 10)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in sums))
    recipe = {
        "steps": steps,
        "run": {"name": "real", "dir": str(folder)},
        "model": {"path": str(model)},
        "data": {"train": str(folder / "sums.jsonl")},
        "agent": {"tools": [], "system_prompt": "Answer with the number alone."},
        # What is sampled decides, so that rewards of a group differ.
        "reward": {"function": "toy_reward:low_tokens"},
        "algorithm": {"name": "gspo", "max_logprob_mismatch": limit},
        "eval": {"at_start": False, "at_end": False, "every_steps": 0},
        "trainer": {
            "num_ranks": 1, "precision": precision, "max_tokens_per_rank": 1024, "updates_per_rollout": 1,
            "optimizer": {"lr": 1e-5},
        },
        "rollout": {
            "num_engines": 1, "prompts_per_step": 2, "samples_per_prompt": 4, "max_turns": 1,
            "max_trajectory_tokens": 128, "sampling": {"max_new_tokens": 12},
            "eval_sampling": {"max_new_tokens": 12},
        },
        "resync": {"verify": "full"},
    }  # fmt: skip
    (folder / "real.yaml").write_text(yaml.safe_dump(recipe))
    return folder / "real.yaml"


@pytest.mark.parametrize("precision", CASES)
def test_all_steps_stay_within_the_limit_of_their_precision(model, tmp_path, precision):
    num_steps, limit = CASES[precision]
    if precision == "block_fp8":
        # Of the matrices that engines fuse, queries, keys and values have no whole number of tiles of 128 rows.
        out = tmp_path / "fp8"
        command = [*TOOLS, "quantize", str(model), str(out), "--not-convert", "self_attn"]
        subprocess.run(command, check=True, timeout=QUANTIZE_S)
        model, precision = out, "fp32"
    succeed("train", str(write_recipe(tmp_path, model, precision, num_steps, limit)), timeout_s=RUN_S)
    steps = [line for line in read_metrics(RunFolder(tmp_path / "real").metrics) if "mismatch/logprob_abs_mean" in line]
    assert len(steps) == num_steps
    mismatch = [line["mismatch/logprob_abs_mean"] for line in steps]
    print(mismatch)
    assert max(mismatch) < limit
    assert [line["resync/fingerprint_mismatches"] for line in steps] == [0] * num_steps
    # The weights moved all the while.
    assert min(line["policy/grad_norm"] for line in steps) > 0
