"""verify, inspect and slice-layers across formats: converted checkpoints, runs, transformers and the trainer."""

from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from slimrl_tools.cli import app
from slimrl_tools.convert.hf_to_megatron import hf_to_megatron
from slimrl_tools.convert.options import Options
from slimrl_tools.inspect.config_diff import diff_config
from slimrl_tools.inspect.inspection import inspect_checkpoint
from slimrl_tools.verify.compare import EXACT, compare_tensors
from slimrl_tools.verify.verification import LogitRequest, verify
from small_models import CONFIGS, small_model
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner
from weight_cases import change_layout, join, loaded_chunks, trainer_config

from slimrl.config.schema.trainer import ParallelConfig
from slimrl.trainer.worker import TrainerWorker

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

LOGITS = LogitRequest(num_prompts=3, num_tokens=20, dtype="float32")


def save_run(rank, world_size, port, hf, out):
    """A run's checkpoint of a model as it was loaded, optimizer and all."""
    worker = TrainerWorker(
        trainer_config(ParallelConfig()), hf, seed=0, rank=rank, world_size=world_size,
        meeting=f"tcp://127.0.0.1:{port}", total_updates=10,
    )  # fmt: skip
    worker.load_hf()
    (out / "trainer").parent.mkdir(parents=True)
    worker.save_checkpoint(out / "trainer")
    worker.close()


def verdict(rank, world_size, port, a, b, logits=None):
    """In a process of its own, since Megatron's process groups come into being."""
    return verify(a, b, logits=logits)


def compared(a, b, logits=None):
    (result,) = run_ranks(verdict, 1, a, b, logits, timeout_s=120)
    return result


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """One Qwen3-MoE in every format."""
    folder = tmp_path_factory.mktemp("formats")
    hf = small_model("qwen3_moe", folder / "hf")
    (hf / "tiktoken.model").write_text("ranks")
    hf_to_megatron(
        hf,
        folder / "converted",
        ParallelConfig(tensor=2, sequence=True, expert_tensor=2),
        Options(),
        say=lambda text: None,
    )
    run_ranks(save_run, 1, hf, folder / "run" / "step_000003", timeout_s=120)
    result = CliRunner().invoke(app, ["quantize", str(hf), str(folder / "fp8"), "--block", "16"])
    assert result.exit_code == 0, result.output
    return folder


@pytest.mark.parametrize("place", ["converted/hf", "run/step_000003/trainer/hf", "fp8"])
def test_every_format_keeps_a_tokenizer_that_is_in_a_file_of_its_own_kind(checkpoints, place):
    assert (checkpoints / place / "tiktoken.model").read_text() == "ranks"


@pytest.mark.full
def test_a_run_of_a_model_in_block_fp8_has_plain_weights_and_says_so(checkpoints, tmp_path):
    run_ranks(save_run, 1, checkpoints / "fp8", tmp_path / "step_000003", timeout_s=120)
    facts = inspect_checkpoint(tmp_path / "step_000003")
    assert facts["quantisation"] is None
    assert facts["architecture"] == inspect_checkpoint(checkpoints / "fp8")["architecture"]
    assert compared(tmp_path / "step_000003", checkpoints / "fp8").tensors.num_exceeding == 0


def test_megatron_and_transformers_compute_the_same_of_a_converted_checkpoint(checkpoints):
    result = compared(checkpoints / "hf", checkpoints / "converted", LOGITS)
    assert result.same
    assert result.tensors.differences == []
    assert result.tensors.num_tensors == len(load_file(checkpoints / "hf" / "model.safetensors"))
    assert result.logits.max_abs < 1e-5 * max(1.0, result.logits.largest)
    assert (result.logits.num_tokens, result.logits.greedy_agreement) == (60, 1.0)


def test_a_run_s_checkpoint_is_the_model_that_it_was_made_of(checkpoints):
    result = compared(checkpoints / "run" / "step_000003", checkpoints / "hf")
    assert result.same
    assert result.tensors.differences == []


def test_a_weight_that_changed_on_the_way_is_found_in_a_torch_dist_checkpoint_and_by_its_logits(checkpoints, tmp_path):
    hf = small_model("qwen3_moe", tmp_path / "hf")
    tensors = load_file(hf / "model.safetensors")
    tensors["model.layers.2.self_attn.k_proj.weight"][3, 4] += 2
    save_file(tensors, hf / "model.safetensors")
    result = compared(hf, checkpoints / "converted", LOGITS)
    assert not result.same
    (difference,) = result.tensors.differences
    assert (difference.name, difference.where) == ("model.layers.2.self_attn.k_proj.weight", (3, 4))
    assert not result.logits.within


def test_block_fp8_changes_logits_within_its_limit_and_more_than_rounding_would(checkpoints):
    result = verify(checkpoints / "hf", checkpoints / "fp8", logits=LOGITS)
    assert result.same
    assert result.logits.precision == "block FP8"
    assert 1e-3 < result.logits.relative_rms < result.logits.limit


@pytest.mark.parametrize(
    ("folder", "format_", "dtypes"),
    [
        ("hf", "huggingface", {"float32"}),
        ("fp8", "huggingface", {"float32", "float8_e4m3fn"}),
        ("converted", "torch_dist", {"float32"}),
        ("run/step_000003", "torch_dist", {"float32"}),
        ("run/step_000003/trainer", "torch_dist", {"float32"}),
    ],
)
def test_every_format_is_inspected_and_holds_one_model(checkpoints, folder, format_, dtypes, recwarn):
    facts, expected = (inspect_checkpoint(checkpoints / name) for name in (folder, "hf"))
    assert (facts["format"], set(facts["storage"]["dtypes"])) == (format_, dtypes)
    assert facts["parameters"] == expected["parameters"]
    assert facts["architecture"] == expected["architecture"]
    assert facts["storage"]["files"] >= 1
    if format_ == "torch_dist":
        weight_bytes = sum(held["bytes"] for held in facts["storage"]["dtypes"].values())
        # The vocabulary of 131 is padded to a multiple of the tensor-parallel size.
        assert 0 <= weight_bytes - 4 * facts["parameters"]["total"] <= 2 * 4 * 32
        # Parameters and the two moments of Adam, in float32.
        assert (facts["torch_dist"]["optimizer_bytes"] > 2 * weight_bytes) == folder.startswith("run")
        assert facts["torch_dist"]["saved_under"]["tensor"] == (1 if folder.startswith("run") else 2)
    assert CliRunner().invoke(app, ["inspect", str(checkpoints / folder)]).exit_code == 0
    assert not [warning for warning in recwarn if "torch.distributed is" in str(warning.message)]


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_as_transformers_writes_them_are_built_as_they_say_and_read_whole(name):
    result = diff_config(AutoConfig.for_model(**CONFIGS[name]).to_dict(), trainer_config(ParallelConfig()))
    assert result.agrees
    assert result.unread == {}


def slice_loads(rank, world_size, port, path):
    """Raises where the trainer does not take a checkpoint."""
    join(rank, world_size, port)
    change_layout(ParallelConfig(tensor=2, sequence=True, expert=2))
    loaded_chunks(path, ParallelConfig(tensor=2, sequence=True, expert=2))


@pytest.mark.parametrize("name", ["deepseek_v3", pytest.param("qwen3_moe", marks=pytest.mark.full),
                                  pytest.param("glm4_moe", marks=pytest.mark.full)])  # fmt: skip
def test_the_first_layers_load_in_transformers_and_in_the_trainer(tmp_path, name):
    whole, part = small_model(name, tmp_path / "whole"), tmp_path / "part"
    result = CliRunner().invoke(app, ["slice-layers", str(whole), str(part), "--layers", "2"])
    assert result.exit_code == 0, result.output
    model = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
    model.model.layers = model.model.layers[:2]
    sliced = AutoModelForCausalLM.from_pretrained(part, dtype=torch.float32)
    tokens_1T = torch.arange(30)[None]
    with torch.no_grad():
        assert compare_tensors("logits", model(tokens_1T).logits, sliced(tokens_1T).logits, EXACT) is None
    run_ranks(slice_loads, 2, part, timeout_s=120)


def test_the_command_says_which_checkpoint_has_no_config(checkpoints, tmp_path: Path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in (checkpoints / "converted").iterdir():
        if file.is_file():
            (bare / file.name).symlink_to(file)
    facts = inspect_checkpoint(bare)
    assert facts["family"] is None
    assert "--hf" in facts["reason"]
    assert inspect_checkpoint(bare, checkpoints / "hf")["family"] == "qwen3_moe"
    assert verify(checkpoints / "hf", bare).same
    refused = CliRunner().invoke(app, ["verify", str(bare), str(bare)])
    assert refused.exit_code == 2
    assert "give one with --hf" in refused.output
