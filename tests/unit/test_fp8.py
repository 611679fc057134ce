"""Block FP8 against a reference that goes tile by tile in numpy, with the codes of e4m3 from their definition."""

import json

import numpy as np
import pytest
import torch
from hard_matrices import hard_matrix

from slimrl.checkpoints.hf_checkpoint import open_hf_checkpoint
from slimrl.checkpoints.safetensors_folder import write_safetensors
from slimrl.data.model_weights import TensorSpec
from slimrl.models.family import family_of
from slimrl.models.hf_config import published_config
from slimrl.quantization import fp8
from slimrl.quantization.fp8 import BlockFp8, dequantize, quantize
from slimrl.quantization.fp8_tensors import quantized_names


def e4m3_values() -> np.ndarray:
    """float32 [127]: value of the codes 0..126: four bits of exponent with bias 7, three of mantissa; 127 is NaN."""
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    subnormal = mantissa / 8 * 2.0**-6
    return np.where(exponent == 0, subnormal, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0)).astype(np.float32)


def nearest_code(values: np.ndarray) -> np.ndarray:
    """uint8: the code next to each float32, an even one between two; found by comparing with all of them."""
    table, sizes = e4m3_values().astype(np.float64), np.abs(values).astype(np.float64)
    above = np.clip(np.searchsorted(table, sizes), 1, 126)
    down, up = sizes - table[above - 1], table[above] - sizes
    code = np.where((down < up) | ((down == up) & (above % 2 == 1)), above - 1, above)
    return (code + 128 * np.signbit(values)).astype(np.uint8)


def reference(weight: np.ndarray, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(codes, scales, dequantised) of a float32 matrix."""
    rows, columns = weight.shape
    codes = np.zeros(weight.shape, np.uint8)
    scales = np.zeros((-(-rows // block[0]), -(-columns // block[1])), np.float32)
    back = np.zeros_like(weight)
    table = np.concatenate([e4m3_values(), [np.nan]]).astype(np.float32)
    for r in range(scales.shape[0]):
        for c in range(scales.shape[1]):
            tile = np.s_[r * block[0] : (r + 1) * block[0], c * block[1] : (c + 1) * block[1]]
            scale = np.float32(max(np.abs(weight[tile]).max(), np.float32(1e-10))) / np.float32(448)
            codes[tile] = nearest_code(weight[tile] / scale)
            scales[r, c] = scale
            back[tile] = table[codes[tile] & 127] * scale * np.where(codes[tile] > 127, -1, 1).astype(np.float32)
    return codes, scales, back


@pytest.mark.parametrize(
    ("shape", "block"),
    [((256, 256), (128, 128)), ((300, 200), (128, 128)), ((5, 7), (128, 128)), ((1, 129), (128, 128)),
     ((70, 90), (16, 32)), ((129, 1), (128, 128)), ((33, 64), (1, 8))],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_scales_and_values_equal_the_reference_bit_for_bit(shape, block, dtype):
    weight = hard_matrix(*shape, dtype)
    quantized, scale = quantize(weight, block)
    codes, scales, back = reference(weight.float().numpy(), block)
    assert quantized.dtype == torch.float8_e4m3fn
    assert scale.dtype == torch.float32
    assert np.array_equal(quantized.view(torch.uint8).numpy(), codes)
    assert np.array_equal(scale.numpy(), scales)
    assert np.array_equal(dequantize(quantized, scale, torch.float32, block).numpy(), back)
    rounded = torch.from_numpy(back).bfloat16()
    assert torch.equal(dequantize(quantized, scale, torch.bfloat16, block), rounded)


def test_bands_change_nothing(monkeypatch):
    weight = hard_matrix(700, 130, torch.bfloat16)
    whole = quantize(weight)
    back = dequantize(*whole, torch.bfloat16)
    monkeypatch.setattr(fp8, "BAND_BYTES", 1)
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(whole, quantize(weight), strict=True)
    )
    assert torch.equal(dequantize(*whole, torch.bfloat16), back)


def test_a_transposed_matrix_is_quantised_as_its_copy():
    weight = hard_matrix(150, 140, torch.bfloat16).t()
    assert torch.equal(quantize(weight)[0].view(torch.uint8), quantize(weight.contiguous())[0].view(torch.uint8))


def test_every_code_is_dequantised_as_torch_converts_it():
    codes = torch.arange(256, dtype=torch.uint8)
    finite = codes[(codes & 127) != 127].view(1, -1).view(torch.float8_e4m3fn)
    assert torch.equal(dequantize(finite, torch.ones(1, 2), torch.float32), finite.float())
    for code in (127, 255):
        with pytest.raises(ValueError, match="holds NaN"):
            dequantize(
                torch.tensor([[3, code]], dtype=torch.uint8).view(torch.float8_e4m3fn), torch.ones(1, 1), torch.float32
            )


def test_the_error_stays_below_half_a_step_of_e4m3():
    weight = hard_matrix(512, 512, torch.float32, seed=1).double()
    quantized, scale = quantize(weight.float())
    error = (dequantize(quantized, scale, torch.float32).double() - weight).abs()
    absmax = scale.double().mul(448).repeat_interleave(128, 0).repeat_interleave(128, 1)
    normal = weight.abs() >= absmax / 28672
    assert normal.any()
    assert not normal.all()
    assert (error <= weight.abs() * (2.0**-4 + 2.0**-22))[normal].all()
    assert (error <= absmax / 458752 * (1 + 2.0**-22))[~normal].all()


def test_quantising_the_dequantised_gives_the_same_codes():
    quantized, scale = quantize(hard_matrix(256, 384, torch.float32))
    again, scale_again = quantize(dequantize(quantized, scale, torch.float32))
    torch.testing.assert_close(scale_again, scale, rtol=1e-6, atol=0)
    assert torch.equal(again.view(torch.uint8), quantized.view(torch.uint8))


def test_the_largest_value_of_a_tile_survives_almost_exactly():
    weight = hard_matrix(256, 256, torch.float32)
    back = dequantize(*quantize(weight), torch.float32)
    for r, c in ((0, 128), (128, 0), (128, 128)):
        tile = np.s_[r : r + 128, c : c + 128]
        assert back[tile].abs().max() == pytest.approx(weight[tile].abs().max().item(), rel=3e-7)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused(bad):
    weight = torch.ones(300, 300, dtype=torch.bfloat16)
    weight[299, 3] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantize(weight)


@pytest.mark.parametrize(
    "tensor", [torch.ones(3), torch.ones(3, 3, dtype=torch.int32), torch.ones(2, 2).to(torch.float8_e4m3fn)]
)
def test_only_matrices_of_floats_are_quantised(tensor):
    with pytest.raises(ValueError, match="only matrices of floats"):
        quantize(tensor)


def test_slices_are_dequantised_like_the_whole(tmp_path):
    weight = hard_matrix(300, 200, torch.bfloat16)
    quantized, scale = quantize(weight, (64, 32))
    plain = torch.arange(5.0)
    tensors = {"a.weight": quantized, "a.weight_scale_inv": scale, "norm": plain}
    write_checkpoint(tmp_path, tensors, {"weight_block_size": [64, 32]})
    whole = dequantize(quantized, scale, torch.bfloat16, (64, 32))
    with open_hf_checkpoint(tmp_path) as reader:
        assert list(reader.specs) == ["a.weight", "norm"]
        assert reader.specs["a.weight"] == TensorSpec(name="a.weight", shape=(300, 200), dtype="bfloat16")
        assert torch.equal(reader.read("norm", (slice(0, 5),)), plain)
        for rows in ((0, 300), (0, 64), (64, 128), (63, 65), (1, 299), (299, 300), (100, 100), (300, 300)):
            for columns in ((0, 200), (32, 64), (31, 33), (199, 200), (5, 6)):
                slices = (slice(*rows), slice(*columns))
                assert torch.equal(reader.read("a.weight", slices), whole[slices]), slices


def write_checkpoint(folder, tensors, quantization):
    specs = [
        TensorSpec(name=name, shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch."))
        for name, t in tensors.items()
    ]
    write_safetensors(folder, specs, tensors.items())
    config = {"dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"} | quantization}
    (folder / "config.json").write_text(json.dumps(config))


def test_scales_in_another_float_kind_are_read_too(tmp_path):
    quantized, scale = quantize(hard_matrix(130, 130, torch.bfloat16))
    for kind in (torch.bfloat16, torch.float8_e8m0fnu):
        folder = tmp_path / str(kind)
        folder.mkdir()
        tensors = {"a.weight": quantized, "a.weight_scale_inv": scale.to(kind)}
        write_checkpoint(folder, tensors, {"weight_block_size": [128, 128], "scale_fmt": "ue8m0"})
        with open_hf_checkpoint(folder) as reader:
            read = reader.read("a.weight", (slice(0, 130), slice(0, 130)))
        assert torch.equal(read, dequantize(quantized, scale.to(kind).float(), torch.bfloat16))


def test_tensors_that_are_not_block_fp8_are_refused_by_name(tmp_path):
    quantized, scale = quantize(torch.ones(130, 130))
    cases = {
        "a_scale_inv: no float8 tensor has these scales": {
            "a": torch.ones(130, 130),
            "a_scale_inv": scale,
            "b": quantized,
            "b_scale_inv": scale,
        },
        "a: float8, but _scale_inv is missing": {"a": quantized},
        "a: float8 of shape \\[2, 130, 130\\]": {"a": quantized.expand(2, -1, -1), "a_scale_inv": scale},
        "a: scales \\[1, 2\\], tiles of \\[128, 128\\] need \\[2, 2\\]": {
            "a": quantized,
            "a_scale_inv": scale[:1],
        },
    }
    for number, (message, tensors) in enumerate(cases.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_checkpoint(folder, tensors, {"weight_block_size": [128, 128]})
        with pytest.raises(ValueError, match=f"1 tensors are not in block FP8, such as {message}"):
            open_hf_checkpoint(folder)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "awq"}, "quant_method 'awq', only 'fp8' is supported"),
        ({"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [1, 1]}, "fmt 'e5m2', only 'e4m3'"),
        ({"quant_method": "fp8"}, "weight_block_size None"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size \[128\]"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, r"weight_block_size \[128, 0\]"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"}, "activation_scheme"),
    ],
)
def test_other_quantisations_are_refused_by_name(quantization, message):
    with pytest.raises(ValueError, match=message):
        BlockFp8.of_config({"quantization_config": quantization})


def test_a_config_says_what_it_was_read_from():
    config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [64, 32],
        "modules_to_not_convert": ["lm_head"],
    }
    parsed = BlockFp8.of_config({"quantization_config": config})
    assert parsed == BlockFp8(block=(64, 32), not_converted=("lm_head",))
    assert parsed.as_config() == config
    # The name that compressed checkpoints of other makers give to the list.
    config["ignored_layers"] = config.pop("modules_to_not_convert")
    assert BlockFp8.of_config({"quantization_config": config}) == parsed
    assert BlockFp8.of_config({"quantization_config": None}) is None
    assert BlockFp8.of_config({}) is None


@pytest.mark.parametrize(
    ("name", "large"), [("Qwen3-Next-80B-A3B", ["in_proj_qkvz"]), ("Qwen3.5-35B-A3B", ["in_proj_qkv", "in_proj_z"])]
)
def test_of_a_delta_net_the_large_projections_alone_are_quantised(name, large):
    hf_config = {**published_config(name), "num_hidden_layers": 4, "num_experts": 4}
    weight_map = family_of(hf_config).weight_map(hf_config)
    names = quantized_names(weight_map, BlockFp8(block=(128, 128), not_converted=()))
    layer = "model.layers.0.linear_attn."
    assert {each for each in names if each.startswith(layer)} == {f"{layer}{x}.weight" for x in [*large, "out_proj"]}
    assert "model.layers.0.mlp.shared_expert.up_proj.weight" in names
    assert "model.layers.0.mlp.shared_expert_gate.weight" not in names
