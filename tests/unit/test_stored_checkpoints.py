"""Checkpoints that store more than their weights, or store them otherwise: what every command makes of them."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from slimrl_tools.cli import app
from slimrl_tools.toy.toy import write_toy
from slimrl_tools.toy.toy_configs import ToySize
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from slimrl.checkpoints.hf_check import check_checkpoint
from slimrl.data.model_weights import TensorSpec
from slimrl.models.family import family_of
from slimrl.models.hf_config import BLOCK_FP8, read_hf_config
from slimrl.models.tensor_names import EMBEDDING, HEAD, left_out
from slimrl.resync.transform import quantize_transform

SIZE = ToySize(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=16, moe_intermediate=16)
FP8 = torch.float8_e4m3fn
FILE = "model-00001-of-00001.safetensors"


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def toy(folder: Path, family: str, tensors=None, **config) -> Path:
    """A toy whose file and config.json have these changes; `tensors` makes a file's tensors from the toy's."""
    write_toy(family, folder, SIZE, 0)
    stored = load_file(folder / FILE)
    (folder / "model.safetensors.index.json").unlink()
    (folder / FILE).unlink()
    save_file(stored if tensors is None else tensors(stored), folder / "model.safetensors")
    given = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(given | config))
    return folder


def tied(folder: Path, change: float | None) -> Path:
    """A tied Qwen3 that stores its head; `change`: of the head's last value, None for a tied one without a head."""

    def tensors(stored):
        stored.pop(HEAD, None)
        if change is None:
            return stored
        head = stored[EMBEDDING].clone()
        head[-1, -1] += change
        return stored | {HEAD: head}

    return toy(folder, "qwen3", tensors, tie_word_embeddings=True)


def with_buffers(folder: Path) -> Path:
    """A DeepSeek-V3 with frequencies in each layer, of a length that its attention does not have, as Kimi-K2's."""
    name = "model.layers.{}.self_attn.rotary_emb.inv_freq"
    return toy(folder, "deepseek_v3", lambda stored: stored | {name.format(layer): torch.rand(7) for layer in range(2)})


@pytest.mark.parametrize("kind", ["a head that repeats the embedding", "frequencies"])
def test_what_no_model_reads_is_left_out_by_every_command_and_the_weights_stay(tmp_path, kind):
    if kind == "frequencies":
        given, first = with_buffers(tmp_path / "given"), "model.layers.0.self_attn.rotary_emb.inv_freq"
        plain = toy(tmp_path / "plain", "deepseek_v3")
    else:
        given, first = tied(tmp_path / "given", 0.0), HEAD
        plain = tied(tmp_path / "plain", None)
    weights = load_file(plain / "model.safetensors")
    note = f"{given}: {first}"
    assert check_checkpoint(given) is False
    assert f"are left out: {first}" in run("inspect", given)
    assert note in run("convert", "hf-to-megatron", given, tmp_path / "mcore")
    run("convert", "megatron-to-hf", tmp_path / "mcore", tmp_path / "back")
    for other in ("mcore", "back", "plain"):
        said = run("verify", given, tmp_path / other)
        assert note in said
        assert f"{len(weights)} tensors compared: {len(weights)} equal bit for bit" in said
        assert said.endswith("the same")
    # A checkpoint with them and one without are of one model.
    assert note in run("average", given, plain, tmp_path / "mean")
    assert note in run("slice-layers", given, tmp_path / "slice", "--layers", 1)
    assert note in run("quantize", given, tmp_path / "fp8", "--block", 16)
    run("dequantize", tmp_path / "fp8", tmp_path / "dequantised", "--dtype", "fp32")
    for written in ("back", "mean", "dequantised"):
        assert load_file(tmp_path / written / FILE).keys() == weights.keys()
    for written in ("slice", "fp8"):
        assert check_checkpoint(tmp_path / written) is False
        assert not left_out(load_file(tmp_path / written / FILE), json.loads((given / "config.json").read_text()))


@pytest.mark.parametrize("change", [2.0**-20, float("nan")])
def test_a_head_that_a_tied_model_should_not_have_is_refused_by_every_command(tmp_path, change):
    given, plain, out = tied(tmp_path / "given", change), tied(tmp_path / "plain", None), tmp_path / "out"
    says = f"{HEAD} differs from {EMBEDDING}, though config.json says tie_word_embeddings: true"
    with pytest.raises(ValueError, match=re.escape(says)):
        check_checkpoint(given)
    for arguments in (
        ("inspect", given),
        ("verify", plain, given),
        ("convert", "hf-to-megatron", given, out),
        ("average", plain, given, out),
        ("quantize", given, out, "--block", 16),
        ("slice-layers", given, out, "--layers", 1),
    ):
        assert says in run(*arguments, code=2)
    assert not out.exists()
    # With a head of its own it is another model, which is taken.
    config = json.loads((given / "config.json").read_text())
    (given / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    assert check_checkpoint(given) is False


def test_a_head_that_repeats_an_embedding_with_nan_is_a_copy(tmp_path):
    def tensors(stored):
        stored[EMBEDDING][1, 2] = float("nan")
        return stored | {HEAD: stored[EMBEDDING].clone()}

    assert check_checkpoint(toy(tmp_path / "given", "qwen3", tensors, tie_word_embeddings=True)) is False


def test_a_head_of_another_shape_is_no_copy(tmp_path):
    given = toy(
        tmp_path / "given", "qwen3", lambda stored: stored | {HEAD: torch.zeros(3, 32)}, tie_word_embeddings=True
    )
    with pytest.raises(ValueError, match=f"{HEAD} differs from {EMBEDDING}"):
        check_checkpoint(given)


@pytest.mark.parametrize(
    "quantization",
    [
        BLOCK_FP8,
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        {"quant_method": "mxfp4"},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
    ],
    ids=lambda quantization: quantization["quant_method"],
)
def test_plain_weights_under_a_quantization_config_are_refused_with_the_remedy(tmp_path, quantization):
    given = toy(
        tmp_path / "given",
        "deepseek_v3",
        lambda stored: {name: tensor.bfloat16() for name, tensor in stored.items()},
        quantization_config=quantization,
        dtype="bfloat16",
    )
    says = (
        f"config.json has a quantization_config ({quantization['quant_method']}), but all weights are plain (bfloat16)"
    )
    with pytest.raises(ValueError, match=re.escape(says)):
        check_checkpoint(given)
    out = tmp_path / "out"
    for arguments in (
        ("inspect", given),
        ("verify", given, given),
        ("convert", "hf-to-megatron", given, out),
        ("average", given, given, out),
        ("quantize", given, out, "--block", 16),
        ("dequantize", given, out),
        ("slice-layers", given, out, "--layers", 1),
    ):
        assert says in run(*arguments, code=2)
    config = json.loads((given / "config.json").read_text())
    del config["quantization_config"]
    (given / "config.json").write_text(json.dumps(config))
    assert check_checkpoint(given) is False


def test_a_matrix_in_another_format_than_quantization_config_says_is_named(tmp_path):
    toy(tmp_path / "plain", "qwen3")
    run("quantize", tmp_path / "plain", tmp_path / "fp8", "--block", 16)
    plain, stored = load_file(tmp_path / "plain" / "model.safetensors"), load_file(tmp_path / "fp8" / FILE)
    name = "model.layers.1.mlp.down_proj.weight"
    del stored[f"{name}_scale_inv"]
    save_file(stored | {name: plain[name]}, tmp_path / "fp8" / FILE)
    (tmp_path / "fp8" / "model.safetensors.index.json").unlink()
    (tmp_path / "fp8" / FILE).rename(tmp_path / "fp8" / "model.safetensors")
    with pytest.raises(ValueError, match=f"{name}: plain, but quantization_config makes it float8"):
        check_checkpoint(tmp_path / "fp8")
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["down_proj"]
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"0\.mlp\.down_proj\.weight: float8, but quantization_config leaves it plain"):
        check_checkpoint(tmp_path / "fp8")


def test_layers_for_multi_token_prediction_in_block_fp8_are_taken_with_their_copies_in_the_list(tmp_path):
    write_toy("glm4_moe", tmp_path / "toy", replace(SIZE, mtp_layers=1), 0)
    copy = "model.layers.2.embed_tokens"
    run("quantize", tmp_path / "toy", tmp_path / "fp8", "--block", 16, "--not-convert", copy)
    config = read_hf_config(tmp_path / "fp8")
    assert {copy, "model.layers.2.shared_head.head"} <= set(config["quantization_config"]["modules_to_not_convert"])
    assert check_checkpoint(tmp_path / "fp8") is True
    run("slice-layers", tmp_path / "fp8", tmp_path / "slice", "--layers", 1)
    run("convert", "hf-to-megatron", tmp_path / "fp8", tmp_path / "mcore")
    run("dequantize", tmp_path / "fp8", tmp_path / "plain", "--dtype", "fp32")
    run("verify", tmp_path / "plain", tmp_path / "mcore")
    stored = {name for name, tensor in load_file(tmp_path / "fp8" / FILE).items() if tensor.dtype == FP8}
    for mtp in (True, False):
        sent = quantize_transform(config, family_of(config).weight_map(config, mtp=mtp), fp8_engines=True)
        assert {name for name in stored if sent.changes(TensorSpec(name=name, shape=(16, 16), dtype="float32"))} == {
            name for name in stored if mtp or ".layers.2." not in name
        }


def test_a_tied_model_in_block_fp8_may_list_its_head(tmp_path):
    run("quantize", tied(tmp_path / "tied", None), tmp_path / "fp8", "--block", 16)
    config = read_hf_config(tmp_path / "fp8")
    config["quantization_config"]["modules_to_not_convert"].append("lm_head")
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    assert check_checkpoint(tmp_path / "fp8") is False
    run("slice-layers", tmp_path / "fp8", tmp_path / "slice", "--layers", 1)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5_moe"])
def test_experts_as_transformers_holds_them_are_told_with_what_to_do(tmp_path, family):
    write_toy(family, tmp_path / "toy", SIZE, 0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "toy")
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    with pytest.raises(ValueError, match="does not match its config") as caught:
        check_checkpoint(tmp_path / "fused")
    first, *lines = str(caught.value).splitlines()
    fused = [name for name in load_file(tmp_path / "fused" / "model.safetensors") if name.endswith("gate_up_proj")]
    assert re.search(rf"tensors missing, {2 * len(fused)} unknown", first)
    assert f"{fused[0].removesuffix('gate_up_proj')}" in lines[0]
    assert "hold all experts of a layer, as transformers 5 saves them with save_original_format=False" in lines[0]
    assert len(lines) == 1
    assert "save_original_format=False" in run("inspect", tmp_path / "fused")
    # What the line advises.
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "fused")
    again = AutoModelForCausalLM.from_config(loaded.config)
    again.load_state_dict(loaded.state_dict())
    again.save_pretrained(tmp_path / "split")
    check_checkpoint(tmp_path / "split")


def test_missing_and_unknown_tensors_are_both_listed_however_many_there_are(tmp_path):
    def renamed(stored):
        return {name.replace("mlp.experts", "moe.experts"): tensor for name, tensor in stored.items()}

    given = toy(tmp_path / "given", "qwen3_moe", renamed)
    with pytest.raises(ValueError, match="does not match its config") as caught:
        check_checkpoint(given)
    _, *lines = str(caught.value).splitlines()
    count = 2 * SIZE.experts * 3
    assert [line.endswith(": missing") for line in lines[:10]] == [True] * 10
    assert lines[10].strip() == f"and {count - 10} more missing"
    assert [line.endswith(": not part of this model") for line in lines[11:21]] == [True] * 10
    assert lines[21].strip() == f"and {count - 10} more unknown"
    assert len(lines) == 22
