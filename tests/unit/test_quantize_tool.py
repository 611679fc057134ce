"""`slimrl-tools quantize` and `dequantize` on toys: what is quantised, what comes back, what happens when they stop."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from slimrl_tools.cli import app
from slimrl_tools.convert import conversion
from slimrl_tools.convert import safetensors_writer as writer
from slimrl_tools.derive import quantize as quantize_module
from slimrl_tools.derive import rewrite
from slimrl_tools.exit_codes import CheckFailed
from toy_tools import run
from transformers import AutoModelForCausalLM
from transformers.quantizers import quantizer_finegrained_fp8
from typer.testing import CliRunner

from slimrl.checkpoints.hf_checkpoint import open_hf_checkpoint
from slimrl.checkpoints.safetensors_folder import SafetensorsFolder
from slimrl.config.load import load_recipe
from slimrl.models.architecture import architecture_of, check_architecture, weights_folder
from slimrl.models.hf_config import read_hf_config
from slimrl.quantization.fp8 import dequantize, quantize

ROOT = Path(__file__).parents[2]

SMALL_FILES = ("--shard-gb", "0.00002")


def tensors_of(folder) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def files_of(folder) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_linear_layers_and_experts_are_quantised_and_nothing_else(toy, tmp_path):
    run("quantize", toy, tmp_path / "fp8", "--block", 16)
    before, after = tensors_of(toy), tensors_of(tmp_path / "fp8")
    for name, tensor in before.items():
        if name.endswith("_proj.weight"):
            codes, scales = quantize(tensor, (16, 16))
            assert torch.equal(after.pop(name).view(torch.uint8), codes.view(torch.uint8))
            assert torch.equal(after.pop(f"{name}_scale_inv"), scales)
        else:
            assert torch.equal(after.pop(name), tensor)
    assert not after
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert config.pop("quantization_config") == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [16, 16],
        "modules_to_not_convert": [
            "model.embed_tokens",
            "model.layers.0.mlp.gate",
            "model.layers.1.mlp.gate",
            "lm_head",
        ],
    }
    assert config == json.loads((toy / "config.json").read_text())
    others = {file.name for file in toy.iterdir()} - {"config.json"}
    for name in others - {file.name for file in toy.glob("model*")}:
        assert (tmp_path / "fp8" / name).read_bytes() == (toy / name).read_bytes()


def test_transformers_computes_with_it_what_it_computes_with_ours_dequantised(toy, tmp_path, monkeypatch):
    run("quantize", toy, tmp_path / "fp8", "--block", 16)
    run("dequantize", tmp_path / "fp8", tmp_path / "plain", "--dtype", "fp32")
    # transformers asks for accelerate before it dequantises on a CPU, which it does without it.
    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda: True)
    ids = torch.arange(40).view(2, 20)
    logits = {}
    for name in ("toy", "fp8", "plain"):
        model, info = AutoModelForCausalLM.from_pretrained(
            tmp_path / name, dtype=torch.float32, output_loading_info=True
        )
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        with torch.no_grad():
            logits[name] = model(ids).logits
    torch.testing.assert_close(logits["fp8"], logits["plain"], rtol=0, atol=1e-6)
    assert not torch.equal(logits["fp8"], logits["toy"])


def test_matrices_of_many_tiles_pass_their_check(toy, tmp_path):
    block = 3
    run("quantize", toy, tmp_path / "fp8", "--block", block)
    before, after = tensors_of(toy), tensors_of(tmp_path / "fp8")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert len(before[name]) > quantize_module.CHECKED_TILE_ROWS * block
    assert torch.equal(after[f"{name}_scale_inv"], quantize(before[name], (block, block))[1])


def test_the_check_refuses_a_result_with_other_tensors_or_shapes(toy, tmp_path):
    run("quantize", toy, tmp_path / "fp8", "--block", 16)
    good, file = tensors_of(tmp_path / "fp8"), tmp_path / "fp8" / "model-00001-of-00001.safetensors"
    norm = "model.norm.weight"
    cases = {
        "other tensors than in the source: model.norm.weight$": {k: v for k, v in good.items() if k != norm},
        "other tensors than in the source: more$": {**good, "more": torch.ones(1)},
        r"model.norm.weight: shape \(31,\), the source's is \(32,\)": {**good, norm: good[norm][:31].clone()},
    }
    for message, tensors in cases.items():
        save_file(tensors, file)
        (tmp_path / "fp8" / "model.safetensors.index.json").unlink(missing_ok=True)
        file.rename(tmp_path / "fp8" / "model.safetensors")
        with (
            SafetensorsFolder(toy) as src,
            SafetensorsFolder(tmp_path / "fp8") as result,
            pytest.raises(CheckFailed, match=message),
        ):
            quantize_module.check_quantized(src, result, (16, 16), lambda nbytes: None)


def test_what_comes_back_is_the_rounded_weight_and_a_plain_config(toy, tmp_path):
    run("quantize", toy, tmp_path / "fp8", "--block", 16)
    run("dequantize", tmp_path / "fp8", tmp_path / "plain")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert config == json.loads((toy / "config.json").read_text()) | {"dtype": "bfloat16"}
    before, after = tensors_of(toy), tensors_of(tmp_path / "plain")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        if name.endswith("_proj.weight"):
            tensor = dequantize(*quantize(tensor, (16, 16)), torch.bfloat16, (16, 16))
        assert torch.equal(after[name], tensor.bfloat16())
    with open_hf_checkpoint(tmp_path / "fp8") as reader:
        assert reader.specs.keys() == before.keys()


def test_modules_that_are_named_keep_their_precision(toy, tmp_path):
    run(
        "quantize",
        toy,
        tmp_path / "fp8",
        "--block",
        16,
        "--not-convert",
        "self_attn",
        "--not-convert",
        "layers.1.mlp.experts",
    )
    after = tensors_of(tmp_path / "fp8")
    quantised = {name for name, tensor in after.items() if tensor.dtype == torch.float8_e4m3fn}
    assert quantised
    assert all(name.startswith("model.layers.0.mlp.experts.") for name in quantised)
    listed = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert {"model.layers.1.mlp.experts", "model.layers.0.self_attn.q_proj", "lm_head"} <= set(listed)


def test_input_that_does_not_fit_is_refused_and_nothing_is_written(toy, tmp_path):
    run("quantize", toy, tmp_path / "fp8", "--block", 16)
    (tmp_path / "exists").mkdir()
    out = tmp_path / "out"
    cases = {
        ("quantize", toy, tmp_path / "exists"): "exists; it is not overwritten",
        ("quantize", tmp_path / "fp8", out): "is quantised already",
        ("dequantize", toy, out): "is not quantised",
        ("dequantize", tmp_path / "fp8", out, "--dtype", "int8"): "--dtype int8: one of bf16, fp16, fp32",
        ("quantize", toy, out, "--format", "int4"): "--format int4: fp8-block is the only format",
        ("quantize", toy, out, "--not-convert", "mlp.gat"): "'mlp.gat' is no module of this model",
        ("quantize", toy, out, "--not-convert", "layers.9.embed_tokens"): "'layers.9.embed_tokens' is no module",
        ("quantize", toy, out, "--not-convert", "q_proj"): "engines hold these as one matrix, so name both or neither",
        ("quantize", tmp_path / "nowhere", out): "no such folder",
    }
    before = sorted(tmp_path.iterdir())
    for arguments, message in cases.items():
        assert message in run(*arguments, code=2)
    assert sorted(tmp_path.iterdir()) == before


def test_a_dry_run_says_what_it_would_write_and_writes_nothing(toy, tmp_path):
    before = sorted(tmp_path.iterdir())
    said = run("quantize", toy, tmp_path / "out", *SMALL_FILES, "--dry-run")
    assert "tensors" in said
    assert "files" in said
    assert sorted(tmp_path.iterdir()) == before


def test_an_interrupted_run_is_continued_and_gives_the_same_files(toy, tmp_path, monkeypatch):
    command = ("quantize", toy, tmp_path / "out", "--block", 16, *SMALL_FILES)
    run("quantize", toy, tmp_path / "whole", "--block", 16, *SMALL_FILES)
    written = []

    def fails_at_the_third(file, *rest):
        if len(written) == 2:
            raise OSError(28, "no space left on the disk", str(file))
        original(file, *rest)
        written.append(file.name)

    original = writer.write_safetensors_file
    monkeypatch.setattr(writer, "write_safetensors_file", fails_at_the_third)
    assert "failed: [Errno 28] no space left on the disk" in run(*command, code=1)
    assert not (tmp_path / "out").exists()
    partial = tmp_path / ".out.partial"
    assert sorted(file.name for file in partial.glob("model*")) == written
    assert "left by an interrupted run; continue it with --resume" in run(*command, code=2)
    assert "left by another job (--block differs)" in run(*command, "--block", 8, "--resume", code=2)
    said = run("dequantize", tmp_path / "whole", tmp_path / "out", "--resume", code=2)
    assert (
        "left by another job (--block, --dtype, --format, --not-convert, --shard-gb, the command, the source differ"
        in said
    )

    def takes_only_what_is_missing(file, *rest):
        assert file.name not in written
        original(file, *rest)

    monkeypatch.setattr(writer, "write_safetensors_file", takes_only_what_is_missing)
    run(*command, "--resume")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    assert not partial.exists()


def test_a_source_that_changed_since_is_another_job(toy, tmp_path, monkeypatch):
    def stops(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(rewrite, "write_index", stops)
        assert CliRunner().invoke(app, ["quantize", str(toy), str(tmp_path / "out")]).exit_code != 0
    config = json.loads((toy / "config.json").read_text())
    (toy / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    assert "left by another job (the source differs)" in run("quantize", toy, tmp_path / "out", "--resume", code=2)


def test_a_run_that_finished_nothing_leaves_nothing(toy, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "no space left on the disk")

    monkeypatch.setattr(writer, "write_safetensors_file", full)
    run("quantize", toy, tmp_path / "out", code=1)
    assert [path.name for path in tmp_path.iterdir()] == ["toy"]


@pytest.mark.parametrize("wrong", ["scale", "zeros", "code", "plain"])
def test_the_check_at_the_end_finds_a_wrong_result(toy, tmp_path, monkeypatch, wrong):
    def spoilt(src, group, block):
        for name, tensor in original(src, group, block):
            if wrong == "scale" and name == "model.layers.1.self_attn.o_proj.weight_scale_inv":
                tensor = tensor * 1.2
            if wrong == "zeros" and name.startswith("model.layers.1.self_attn.o_proj.weight"):
                # A scale of 1000 would make the limit for every element of this matrix larger than the element.
                tensor = torch.full_like(tensor, 1000.0) if name.endswith("_scale_inv") else torch.zeros_like(tensor)
            if wrong == "code" and name == "model.layers.1.self_attn.o_proj.weight":
                tensor.view(torch.uint8)[20, 3] ^= 0x80
            if wrong == "plain" and name == "lm_head.weight":
                tensor[3, 3] += 1e-6
            yield name, tensor

    original = quantize_module._quantized
    monkeypatch.setattr(quantize_module, "_quantized", spoilt)
    said = run("quantize", toy, tmp_path / "out", "--block", 16, code=1)
    assert "differs from the source" in said
    assert ("lm_head" if wrong == "plain" else "model.layers.1.self_attn.o_proj.weight") in said
    assert [path.name for path in tmp_path.iterdir()] == ["toy"]


def test_a_file_that_was_written_wrongly_is_made_again_on_a_resume(toy, tmp_path, monkeypatch):
    command = ("dequantize", tmp_path / "fp8", tmp_path / "out", *SMALL_FILES)
    run("quantize", toy, tmp_path / "fp8", "--block", 16)
    run("dequantize", tmp_path / "fp8", tmp_path / "whole", *SMALL_FILES)
    damaged = []

    def spoils_the_third(file, *rest):
        original(file, *rest)
        if file.name.startswith("model-00003"):
            flip(file)
            damaged.append(file.name)

    original = writer.write_safetensors_file
    with monkeypatch.context() as patched:
        patched.setattr(writer, "write_safetensors_file", spoils_the_third)
        said = run(*command, code=1)
    assert f"{damaged[0]}: " in said
    assert "reads back differently than it was written" in said
    assert (tmp_path / ".out.partial" / damaged[0]).exists()
    run(*command, "--resume", "--no-check")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_a_file_of_an_earlier_run_that_has_changed_since_is_found_and_made_again(toy, tmp_path, monkeypatch):
    command = ("quantize", toy, tmp_path / "out", "--block", 16, *SMALL_FILES)
    run("quantize", toy, tmp_path / "whole", "--block", 16, *SMALL_FILES)

    def stops(*_):
        raise OSError(5, "the disk failed")

    with monkeypatch.context() as patched:
        patched.setattr(rewrite, "write_index", stops)
        run(*command, code=1)
    flip(next((tmp_path / ".out.partial").glob("model-00002*")))
    assert "reads back differently than it was written" in run(*command, "--resume", code=1)
    run(*command, "--resume")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def flip(file):
    """Change the last byte of a file, which belongs to a tensor."""
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)


def test_a_file_is_on_the_disk_before_a_resume_takes_it_for_whole(toy, tmp_path, monkeypatch):
    events = []
    original_sync, original_record = os.fsync, conversion.write_record

    def syncs(descriptor):
        events.append(("on disk", Path(f"/proc/self/fd/{descriptor}").readlink().name))
        original_sync(descriptor)

    def records(partial, name, spans):
        events.append(("recorded", name))
        original_record(partial, name, spans)

    monkeypatch.setattr(os, "fsync", syncs)
    monkeypatch.setattr(conversion, "write_record", records)
    run("slice-layers", toy, tmp_path / "out", "--layers", 1, *SMALL_FILES)
    files = sorted(file.name for file in (tmp_path / "out").glob("model*-of-*"))
    assert len(files) > 2
    assert sorted(events) == sorted((what, file) for file in files for what in ("on disk", "recorded"))
    for file in files:
        assert events.index(("on disk", file)) < events.index(("recorded", file))


def test_help_shows_examples():
    for command in ("quantize", "dequantize"):
        assert f"slimrl-tools {command}" in run(command, "--help")


def test_the_commands_of_the_page_make_the_two_models_of_the_recipe(toy, tmp_path, monkeypatch):
    recipe = ROOT / "recipes" / "qwen3_moe" / "qwen3_30b_a3b_gspo_fp8_rollout.yaml"
    _, section = (ROOT / "docs" / "algorithms.md").read_text().split("\n### Engines in FP8 of a model in bf16\n")
    model = load_recipe(recipe).recipe.model
    commands = re.findall(r"^slimrl-tools (\w.*?)(?: +#.*)?$", section, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(toy, "models/Qwen3-30B-A3B")
    for command in commands[:2]:
        run(*command.split())
    check_architecture(weights_folder(Path(model.megatron)), architecture_of(read_hf_config(Path(model.path))))
    # The trainer's are those before the rounding, the engines' those after it.
    said = run("verify", "models/Qwen3-30B-A3B", model.megatron)
    assert ", 0 within their limit, 0 beyond it" in said
    assert ", 0 within their limit, 0 beyond it" not in run("verify", "models/Qwen3-30B-A3B", model.path)
