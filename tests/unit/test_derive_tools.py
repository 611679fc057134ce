"""`slimrl-tools average` and `slice-layers` on toys: against float64, and against the source's own bytes."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from slimrl_tools.derive.slice_layers import sliced_config
from slimrl_tools.toy.toy import write_toy
from slimrl_tools.toy.toy_configs import ToySize
from toy_tools import SMALL, run

SIZE = replace(SMALL, layers=3)


def toys(folder, count, family="qwen3_moe", size=SIZE):
    paths = [folder / f"seed{seed}" for seed in range(count)]
    for seed, path in enumerate(paths):
        write_toy(family, path, size, seed)
    return paths


def tensors_of(folder) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def test_the_mean_is_that_of_float64_to_the_last_bits_of_float32(tmp_path):
    paths = toys(tmp_path, 3)
    run("average", *paths, tmp_path / "mean", "--weights", "0.5,0.2,0.3", "--shard-gb", 0.0001)
    result = tensors_of(tmp_path / "mean")
    sources = [tensors_of(path) for path in paths]
    assert list(result) == list(sources[0])
    assert len(list((tmp_path / "mean").glob("*.safetensors"))) > 1
    for name, tensor in result.items():
        expected = sum(weight * source[name].double() for weight, source in zip((0.5, 0.2, 0.3), sources, strict=True))
        assert tensor.dtype == torch.float32
        largest = max(source[name].abs().max().item() for source in sources)
        assert (tensor.double() - expected).abs().max() <= 3 * torch.finfo(torch.float32).eps * largest, name
    for file in ("tokenizer.json", "chat_template.jinja", "config.json"):
        assert (tmp_path / "mean" / file).read_bytes() == (paths[0] / file).read_bytes()


def test_equal_weights_are_the_default_and_the_mean_is_rounded_once(tmp_path):
    paths = toys(tmp_path, 2)
    run("average", *paths, tmp_path / "mean", "--dtype", "bf16")
    a, b = (tensors_of(path) for path in paths)
    for name, tensor in tensors_of(tmp_path / "mean").items():
        assert torch.equal(tensor, ((a[name].double() + b[name].double()) / 2).bfloat16()), name
    assert json.loads((tmp_path / "mean" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_bias_that_is_kept_in_float32_stays_so(tmp_path):
    (path,) = toys(tmp_path, 1, "glm4_moe")
    run("average", path, path, tmp_path / "mean", "--dtype", "bf16")
    run("average", tmp_path / "mean", tmp_path / "mean", tmp_path / "again")
    for folder in ("mean", "again"):
        dtypes = {name: tensor.dtype for name, tensor in tensors_of(tmp_path / folder).items()}
        biased = {name for name, dtype in dtypes.items() if dtype == torch.float32}
        assert all(name.endswith("e_score_correction_bias") for name in biased)


def test_block_fp8_is_averaged_dequantised_and_written_plain(tmp_path):
    (path,) = toys(tmp_path, 1)
    run("quantize", path, tmp_path / "fp8", "--block", 16)
    run("dequantize", tmp_path / "fp8", tmp_path / "plain", "--dtype", "fp32")
    run("average", tmp_path / "fp8", tmp_path / "fp8", tmp_path / "mean")
    assert "quantization_config" not in json.loads((tmp_path / "mean" / "config.json").read_text())
    run("verify", tmp_path / "plain", tmp_path / "mean")


def test_checkpoints_of_two_models_are_refused_with_what_differs(tmp_path):
    (path,) = toys(tmp_path, 1)
    write_toy("qwen3_moe", tmp_path / "wide", replace(SIZE, experts=8), 0)
    output = run("average", path, tmp_path / "wide", tmp_path / "mean", code=2)
    assert "are not of one model" in output
    assert "num_moe_experts: 4 and 8" in output
    assert [file.name for file in tmp_path.iterdir() if "mean" in file.name] == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--weights", "0.5,0.6"], "add up to 1.1; they must add up to 1"),
        (["--weights", "1"], "1 of them for 2 checkpoints"),
        (["--weights", "a,b"], "numbers separated by commas"),
        (["--dtype", "int8"], "one of keep, bf16, fp16, fp32"),
    ],
)
def test_weights_and_dtypes_that_cannot_be_are_refused(tmp_path, arguments, says):
    paths = toys(tmp_path, 2)
    assert says in run("average", *paths, tmp_path / "mean", *arguments, code=2)
    assert not (tmp_path / "mean").exists()


def test_one_checkpoint_or_an_existing_output_is_refused_and_a_dry_run_writes_nothing(tmp_path):
    paths = toys(tmp_path, 2)
    assert "at least two" in run("average", paths[0], tmp_path / "mean", code=2)
    assert "exists; it is not overwritten" in run("average", *paths, paths[0], code=2)
    before = sorted(tmp_path.iterdir())
    assert "tensors" in run("average", *paths, tmp_path / "mean", "--dry-run")
    assert "tensors" in run("slice-layers", paths[0], tmp_path / "slice", "--layers", 1, "--dry-run")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("family", ["qwen3", "glm4_moe", "deepseek_v3"])
def test_the_first_layers_keep_their_names_and_bytes(tmp_path, family):
    mtp = 0 if family == "qwen3" else 1
    size = ToySize(
        layers=4, hidden=32, heads=2, kv_heads=1, head_dim=16, experts=4, moe_intermediate=16, mtp_layers=mtp
    )
    write_toy(family, tmp_path / "toy", size, 0)
    run("slice-layers", tmp_path / "toy", tmp_path / "slice", "--layers", 2)
    source, result = tensors_of(tmp_path / "toy"), tensors_of(tmp_path / "slice")
    dropped = tuple(f"model.layers.{layer}." for layer in (2, 3, 4))
    assert set(result) == {name for name in source if not name.startswith(dropped)}
    assert all(torch.equal(tensor, source[name]) for name, tensor in result.items())
    config = json.loads((tmp_path / "slice" / "config.json").read_text())
    assert (config["num_hidden_layers"], config.get("num_nextn_predict_layers", 0)) == (2, 0)


def test_a_slice_of_block_fp8_stays_in_block_fp8_with_its_scales(tmp_path):
    (path,) = toys(tmp_path, 1)
    run("quantize", path, tmp_path / "fp8", "--block", 16)
    run("slice-layers", tmp_path / "fp8", tmp_path / "slice", "--layers", 1)
    source, result = tensors_of(tmp_path / "fp8"), tensors_of(tmp_path / "slice")
    assert "model.layers.0.self_attn.q_proj.weight_scale_inv" in result
    assert all(torch.equal(t.view(torch.uint8), source[name].view(torch.uint8)) for name, t in result.items())
    run("slice-layers", path, tmp_path / "plain", "--layers", 1)
    run("verify", tmp_path / "plain", tmp_path / "slice")


def test_a_config_is_cut_wherever_it_says_something_layer_by_layer():
    config = {
        "num_hidden_layers": 6,
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": 3,
        "max_window_layers": 28,
        "mlp_only_layers": [0, 1, 4],
        "layer_types": ["full_attention"] * 6,
        "moe_layer_freq": 1,
        "eos_token_id": [1, 2, 3, 4, 5, 6],
    }
    assert sliced_config(config, 2) == {
        "num_hidden_layers": 2,
        "num_nextn_predict_layers": 0,
        "first_k_dense_replace": 2,
        "max_window_layers": 2,
        "mlp_only_layers": [0, 1],
        "layer_types": ["full_attention"] * 2,
        "moe_layer_freq": 1,
        "eos_token_id": [1, 2, 3, 4, 5, 6],
    }
    assert sliced_config({**config, "moe_layer_freq": [0, 1, 1, 1, 1, 1]}, 2)["moe_layer_freq"] == [0, 1]
    with pytest.raises(ValueError, match="--layers 7: the model has 6"):
        sliced_config(config, 7)


def test_more_layers_than_there_are_and_broken_sources_are_refused(tmp_path):
    (path,) = toys(tmp_path, 1)
    assert "the model has 3" in run("slice-layers", path, tmp_path / "slice", "--layers", 4, code=2)
    tensors = load_file(path / "model-00001-of-00001.safetensors")
    del tensors["model.layers.2.mlp.gate.weight"]
    (path / "model.safetensors.index.json").unlink()
    (path / "model-00001-of-00001.safetensors").unlink()
    save_file(tensors, path / "model.safetensors")
    output = run("slice-layers", path, tmp_path / "slice", "--layers", 1, code=2)
    assert "model.layers.2.mlp.gate.weight: missing" in output
    assert not (tmp_path / "slice").exists()
