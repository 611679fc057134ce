"""Packed INT4 as compressed-tensors itself writes it; what is refused."""

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from slimrl_tools.cli import app
from slimrl_tools.toy.toy import write_toy
from slimrl_tools.toy.toy_configs import ToySize
from typer.testing import CliRunner

from slimrl.checkpoints.checkpoint_reader import read_whole
from slimrl.checkpoints.hf_check import check_checkpoint
from slimrl.checkpoints.hf_checkpoint import is_block_fp8, is_packed_int4, open_hf_checkpoint
from slimrl.quantization.int4 import PackedInt4
from slimrl.rollout.task.engine_format import engine_transform

WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {**WEIGHTS, "actorder": None}}},
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
}
"""As in Kimi-K2.5"""


def packed(path: Path) -> dict[str, torch.Tensor]:
    """Pack the experts of a checkpoint as its releases do; the matrices that transformers would load, by name."""
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**WEIGHTS))
    (file,) = path.glob("*.safetensors")
    tensors, plain = {}, {}
    for name, weight in load_file(file).items():
        if ".experts." not in name:
            tensors[name] = plain[name] = weight
            continue
        groups = weight.unflatten(1, (-1, 32)).bfloat16()
        scale = (groups.abs().amax(-1) / 7).clamp(min=1e-6)
        compressed = PackedQuantizationCompressor.compress(
            {"weight": weight.bfloat16(), "weight_scale": scale, "weight_zero_point": torch.zeros_like(scale)}, scheme
        )
        stored = {part: compressed[part] for part in ("weight_packed", "weight_scale", "weight_shape")}
        stored["weight_shape"] = stored["weight_shape"].to(torch.int32)
        back = PackedQuantizationCompressor.decompress(dict(stored), scheme)
        plain[name] = back["weight"]
        tensors |= {name.removesuffix("weight") + part: value.contiguous() for part, value in stored.items()}
    save_file(tensors, file, {"format": "pt"})
    (path / "model.safetensors.index.json").unlink(missing_ok=True)
    file.rename(path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (config.get("text_config") or config).update(quantization_config=QUANTIZATION, dtype="bfloat16")
    (path / "config.json").write_text(json.dumps(config))
    return plain


@pytest.fixture(params=["deepseek_v3", "kimi_k25"])
def model(request, tmp_path) -> tuple[Path, dict[str, torch.Tensor], str]:
    """A checkpoint, its matrices, and the prefix of their names."""
    path = tmp_path / "model"
    write_toy(request.param, path, ToySize(layers=2, hidden=64, moe_intermediate=96, experts=4), seed=0)
    return path, packed(path), "language_model." if request.param == "kimi_k25" else ""


def test_packed_matrices_are_read_as_compressed_tensors_unpacks_them(model):
    path, plain, prefix = model
    assert is_packed_int4(path)
    assert not is_block_fp8(path)
    check_checkpoint(path)
    with open_hf_checkpoint(path) as folder:
        for name, spec in folder.specs.items():
            whole = read_whole(folder, name)
            assert torch.equal(whole, plain[prefix + name]), name
            if ".experts." in name:
                assert spec.dtype == "bfloat16"
                part = folder.read(name, (slice(3, 11), slice(37, 50)))
                assert torch.equal(part, whole[3:11, 37:50])


def test_a_packed_checkpoint_becomes_a_plain_one_in_its_own_form(model, tmp_path):
    path, plain, _ = model
    result = CliRunner().invoke(app, ["dequantize", str(path), str(tmp_path / "plain")])
    assert result.exit_code == 0, result.output
    assert "quantization_config" not in (tmp_path / "plain" / "config.json").read_text()
    written = {n: t for file in (tmp_path / "plain").glob("*.safetensors") for n, t in load_file(file).items()}
    assert written.keys() == plain.keys()
    assert all(torch.equal(tensor, plain[name].to(tensor.dtype)) for name, tensor in written.items())
    check_checkpoint(tmp_path / "plain")


def test_a_resync_to_engines_that_hold_int4_is_refused(model):
    with pytest.raises(ValueError, match=r"engines hold its experts in INT4.*slimrl-tools dequantize"):
        engine_transform(model[0])


@pytest.mark.parametrize("lost", ["weight_scale", "weight_shape"])
def test_a_packed_matrix_without_its_parts_is_refused(model, lost):
    path = model[0]
    tensors = load_file(path / "model.safetensors")
    name = next(name for name in tensors if name.endswith(lost))
    del tensors[name]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"weight_packed is there, but .*{lost} missing"):
        open_hf_checkpoint(path)


def test_scales_that_do_not_fit_are_refused(model):
    path = model[0]
    tensors = load_file(path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("weight_scale"))
    tensors[name] = tensors[name][:, :1].contiguous()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="words of 8 columns do not fit"):
        open_hf_checkpoint(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized'"),
        ({"config_groups": {}}, "0 config_groups"),
        ({"config_groups": {"a": {"weights": {**WEIGHTS, "num_bits": 8}}}}, "num_bits 8"),
        ({"config_groups": {"a": {"weights": {**WEIGHTS, "symmetric": False}}}}, "symmetric False"),
        ({"config_groups": {"a": {"weights": {**WEIGHTS, "group_size": 12}}}}, "group_size 12"),
    ],
)
def test_other_formats_of_compressed_tensors_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        PackedInt4.of_config({"quantization_config": {**QUANTIZATION, **changes}})
    assert PackedInt4.of_config({"quantization_config": {"quant_method": "fp8"}}) is None
