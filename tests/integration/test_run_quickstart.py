"""The quickstart's stages in small: a random model, cold start, reinforcement learning, an evaluation of the export.

Its run is continued from its first checkpoint too, to the bit."""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
import yaml
from cli_runs import RECIPES, Workspace, exported, make_workspace, samples, steps_without_times, succeed
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from slimrl.data.token_values import TOKEN_VALUES
from slimrl.observability.metrics import is_metric, read_metrics
from slimrl.observability.profiling.breakdown import step_profiles
from slimrl.observability.profiling.trace import read_spans
from slimrl.observability.recorded_trajectories import read_recorded
from slimrl.observability.run_folder import RunFolder

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1500)]

GSPO, SFT = str(RECIPES / "gspo_calculator.yaml"), str(RECIPES / "sft.yaml")
RUN_S = 400.0
SHORT_SFT = ["steps=6", "trainer.optimizer.warmup_updates=2"]

STEP_METRICS = {
    "step",
    "reward/mean",
    *(f"policy/{name}" for name in ("loss", "clip_fraction", "entropy", "grad_norm")),
    *(f"mismatch/{name}" for name in ("logprob_abs_mean", "logprob_abs_max", "kl_k3")),
    *(f"rollout/{name}" for name in ("tokens", "tokens_per_s", "turns_mean", "truncated_fraction")),
    *(f"rollout/{name}" for name in ("tool_error_fraction", "zero_variance_fraction")),
    *(f"moe/{name}" for name in ("expert_load_max_over_mean", "router_entropy")),
    *(f"train/{name}" for name in ("lr", "skipped_steps")),
    *(f"resync/{name}" for name in ("bytes", "seconds", "version", "fingerprint_mismatches")),
    *(f"time/{name}_s" for name in ("rollout", "logprobs", "train", "resync", "step")),
}


@pytest.fixture
def temporary_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The system's temporary folder, as the commands see it; short, since sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def test_the_quickstart_in_small(tmp_path: Path, temporary_files: Path):
    tools("toy", "qwen3_moe", tmp_path / "model", "--layers", 2, "--hidden", 64, "--moe-intermediate", 64)
    counts = ["--num-train", 32, "--num-heldout", 8, "--num-conversations", 64]
    tools("calculator-data", tmp_path / "data", *counts)
    workspace = Workspace(tmp_path)
    folders = [f"run.dir={tmp_path / 'runs'}", f"data.train={tmp_path / 'data' / 'sft.jsonl'}"]
    succeed("sft", SFT, *folders, f"model.path={tmp_path / 'model'}", *SHORT_SFT, timeout_s=RUN_S)
    sft, gspo = workspace.run_folder("sft"), workspace.run_folder("gspo")
    losses = [line["sft/loss"] for line in read_metrics(sft.metrics)]
    assert len(losses) == 6
    assert losses[-1] < losses[0]

    more = [f"model.path={sft.export}", "steps=2", "eval.at_end=true", "deterministic=true", "checkpoint.every_steps=1"]
    run = succeed(
        "train", GSPO, *workspace.overrides(*more), "tracking.wandb=offline", "--profile", "2", timeout_s=RUN_S
    )
    assert "2/2" in run.stdout
    assert_profile_is_of_step_2(gspo)
    assert_run_folder_is_complete(gspo)
    assert_metrics_hold(read_metrics(gspo.metrics))
    assert_export_is_a_trained_model(sft.export, gspo.export)
    resumed = started_again_after_step_1(gspo, "resumed")
    succeed("train", GSPO, *workspace.overrides(*more), "run.name=resumed", "--resume", timeout_s=RUN_S)
    assert steps_without_times(resumed) == steps_without_times(gspo)
    assert samples(resumed) == samples(gspo)
    assert exported(resumed) == exported(gspo)

    report = tmp_path / "after.json"
    succeed(
        "eval",
        GSPO,
        *workspace.overrides(),
        "--checkpoint",
        str(gspo.export),
        "--json-file",
        str(report),
        timeout_s=RUN_S,
    )
    result = json.loads(report.read_text())
    assert result["checkpoint"] == str(gspo.export)
    assert result["sets"]["heldout"]["num_prompts"] == 8
    # Greedy, so what the run measured at its end is measured again.
    assert result["sets"]["heldout"]["reward_mean"] == read_metrics(gspo.metrics)[-1]["eval/heldout/reward_mean"]
    assert [path.name for path in temporary_files.iterdir() if not path.name.startswith("slimrl-compiled-")] == []


@pytest.mark.full
def test_a_run_that_resyncs_from_every_rank(tmp_path: Path):
    workspace = make_workspace(tmp_path)
    settings = ["steps=2", "resync.transport=p2p", "resync.verify=full", "resync.bucket_bytes=200000"]
    succeed("train", GSPO, *workspace.overrides(*settings), timeout_s=RUN_S)
    assert_metrics_hold(read_metrics(workspace.run_folder("gspo").metrics), evaluated=False)


def tools(*arguments: object) -> None:
    command = [sys.executable, "-m", "slimrl_tools.cli", *map(str, arguments)]
    subprocess.run(command, check=True, timeout=120, stdout=subprocess.DEVNULL)


def assert_run_folder_is_complete(folder: RunFolder) -> None:
    config = yaml.safe_load(folder.config.read_text())
    assert config["steps"] == 2
    assert config["trainer"]["parallel"]["expert"] == 2
    assert json.loads(folder.provenance.read_text())
    assert list(folder.wandb.glob("offline-run-*/*.wandb"))
    for step in (1, 2):
        samples = [json.loads(line) for line in folder.sample_file(step).read_text().splitlines()]
        assert len(samples) == 4
        for sample in samples:
            roles = [message["role"] for message in sample["messages"]]
            assert roles[:3] == ["system", "user", "assistant"]
            assert sample["num_sampled_tokens"] > 0
        recorded = read_recorded(folder.recorded_file(step))
        assert len(recorded) == 16
        for row in recorded:
            (segment,) = row["segments"]
            assert row["messages"][0]["content"].strip() in "".join(segment["texts"])
            if not row["advantage"]:
                continue  # of a zero-variance group, which is not passed
            sampled = [place for place, own in enumerate(segment["loss_mask"]) if own]
            for name in TOKEN_VALUES:
                assert [place for place, value in enumerate(segment[name]) if value is not None] == sampled
            near = [pytest.approx(segment["rollout_logprobs"][place], abs=1e-3) for place in sampled]
            assert [segment["trainer_logprobs"][place] for place in sampled] == near
            assert [segment["advantages"][place] for place in sampled] == [pytest.approx(row["advantage"])] * len(
                sampled
            )
        layers = pyarrow.parquet.read_table(folder.expert_load_file(step)).to_pylist()
        assert [row["layer"] for row in layers] == [0, 1]
        assert len({sum(row["tokens"]) for row in layers}) == 1
    assert len(read_recorded(folder.eval_recorded_file(2, "heldout"))) == 8
    assert folder.curve.read_bytes().startswith(b"\x89PNG")
    logs = {path.name for path in folder.logs.iterdir()}
    assert {"driver.log", "engine_0.log", "engine_1.log", "trainer_0.log", "trainer_1.log"} <= logs


def started_again_after_step_1(whole: RunFolder, name: str) -> RunFolder:
    """A copy of a run's folder without its last checkpoint, after which it has to be continued from the first."""
    copy = RunFolder(whole.path.parent / name)
    shutil.copytree(whole.path, copy.path)
    shutil.rmtree(copy.checkpoints / "step_000002")
    shutil.rmtree(copy.path / "export")
    return copy


def assert_profile_is_of_step_2(folder: RunFolder) -> None:
    [profile] = step_profiles(read_spans(folder.profile))
    assert profile.number == 2
    assert {process.split(" (")[0] for process in profile.processes} >= {"driver", "engine 0", "trainer 1"}


def assert_metrics_hold(lines: list[dict[str, Any]], *, evaluated: bool = True) -> None:
    """One line per step, each complete; engines that computed what the trainer computes, with the step's weights.

    That every sampled token carries its step's weight version is asserted by the reward function.
    """
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert [line["resync/version"] for line in lines] == [0, 1, 2]
    assert [line["resync/fingerprint_mismatches"] for line in lines] == [0, 0, 0]
    for line in lines[1:]:
        assert set(line) >= STEP_METRICS
        assert all(map(is_metric, line))
        assert line["mismatch/logprob_abs_mean"] <= 1e-5
        assert line["policy/grad_norm"] > 0
        assert line["train/skipped_steps"] == 0
    # The policy moves between the two updates of a step, so ratios leave 1.
    assert any(line["policy/clip_fraction"] > 0 for line in lines[1:])
    assert ("eval/heldout/reward_mean" in lines[-1]) == evaluated


def assert_export_is_a_trained_model(before: Path, after: Path) -> None:
    """transformers reads it, tensor names and shapes are those of the model that training started from, values not."""
    model = AutoModelForCausalLM.from_pretrained(after, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(after)
    tokens = tokenizer("12 + 34 = ", return_tensors="pt").input_ids
    with torch.no_grad():
        assert model(tokens).logits.isfinite().all()
    old, new = (weights(path) for path in (before, after))
    assert {name: tensor.shape for name, tensor in old.items()} == {name: tensor.shape for name, tensor in new.items()}
    assert not torch.equal(old["model.embed_tokens.weight"], new["model.embed_tokens.weight"])


def weights(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}
