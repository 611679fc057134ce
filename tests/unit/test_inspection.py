"""What `slimrl-tools inspect` counts, against published sizes and sums over the tensors themselves."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from published_sizes import PUBLISHED_SIZES
from safetensors.torch import load_file, save_file
from slimrl_tools.cli import app
from slimrl_tools.inspect.inspection import inspect_checkpoint
from slimrl_tools.open_checkpoint import find_checkpoint
from slimrl_tools.toy.toy import write_toy
from slimrl_tools.toy.toy_configs import TOYS, ToySize
from typer.testing import CliRunner

from slimrl.models.family import FAMILIES
from slimrl.models.hf_config import published_config, published_names

SIZE = ToySize(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=16, moe_intermediate=16)


BIG = ("DeepSeek-V3", "GLM-4.5", "Kimi-K2", "Kimi-K2.5", "Qwen3-235B-A22B")
"""Whose tables take a second each to write out; the planner's tests count them too."""


WITH_MTP = [family.name for family in FAMILIES if family.has_mtp]


def supported_names():
    model_types = {model_type for family in FAMILIES for model_type in family.model_types}
    names = [name for name in published_names() if published_config(name)["model_type"] in model_types]
    return [name for name in names if name not in BIG]


@pytest.mark.parametrize("name", supported_names())
def test_totals_and_active_parameters_are_those_that_the_model_was_published_with(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parameters = inspect_checkpoint(Path(name))["parameters"]
    total, active = (billions * 1e9 for billions in PUBLISHED_SIZES[name])
    # Published figures are rounded; some count MTP layers, and some count embedding and head as active.
    assert (
        min(abs(count / total - 1) for count in (parameters["total"], parameters["total"] + parameters["mtp"])) < 0.03
    )
    counted = (parameters["active"], parameters["active_without_embedding_and_head"])
    if name.startswith("gpt-oss"):
        # Its published figures leave out the embedding but not the head, which is as large.
        counted = (sum(counted) / 2,)
    # 3.25B and 3.26B besides embedding and head are published as 3B, and so are 3.45B with both.
    rounded = {"Qwen3-Next-80B-A3B": 0.09, "GLM-4.7-Flash": 0.09, "Qwen3.5-35B-A3B": 0.16}
    limit = rounded.get(name, 0.06)
    assert min(abs(count / active - 1) for count in counted) < limit


@pytest.mark.parametrize("family", TOYS)
def test_a_toy_has_as_many_parameters_as_its_file_has_elements(tmp_path, family):
    out = tmp_path / "toy"
    write_toy(family, out, replace(SIZE, mtp_layers=int(family in WITH_MTP)), 0)
    facts = inspect_checkpoint(out)
    tensors = load_file(out / "model-00001-of-00001.safetensors")
    copied = ("shared_head.head.weight", "2.embed_tokens.weight")
    elements = sum(tensor.numel() for name, tensor in tensors.items() if not name.endswith(copied))
    assert facts["family"] == family
    assert facts["parameters"]["total"] + facts["parameters"]["mtp"] == elements
    assert (facts["storage"]["files"], facts["storage"]["dtypes"]["float32"]["tensors"]) == (1, len(tensors))
    assert all(facts["tensors"][kind]["count"] == 0 for kind in ("missing", "unknown", "misshaped"))


def test_active_parameters_are_those_of_the_modules_that_one_token_passes(tmp_path):
    write_toy("qwen3_moe", tmp_path / "toy", SIZE, 0)
    tensors = load_file(tmp_path / "toy" / "model-00001-of-00001.safetensors")
    chosen = range(SIZE.experts_per_token)
    passed = [
        t for name, t in tensors.items() if ".experts." not in name or any(f".experts.{e}." in name for e in chosen)
    ]
    assert inspect_checkpoint(tmp_path / "toy")["parameters"]["active"] == sum(t.numel() for t in passed)


def test_tensors_that_are_missing_unknown_or_misshaped_are_named(tmp_path):
    write_toy("qwen3_moe", tmp_path / "toy", SIZE, 0)
    file = tmp_path / "toy" / "model-00001-of-00001.safetensors"
    tensors = load_file(file)
    tensors["model.layers.9.odd"] = tensors.pop("model.norm.weight")
    tensors["lm_head.weight"] = torch.zeros(3, 32)
    (tmp_path / "toy" / "model.safetensors.index.json").unlink()
    file.unlink()
    save_file(tensors, tmp_path / "toy" / "model.safetensors")
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "toy")])
    assert result.exit_code == 0
    assert "1 tensors are missing: model.norm.weight" in result.output
    assert "1 tensors are unknown: model.layers.9.odd" in result.output
    assert "1 tensors are misshaped: lm_head.weight" in result.output


def test_a_family_that_is_not_supported_is_described_by_its_files(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    save_file({"a": torch.zeros(3, 5, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    facts = inspect_checkpoint(tmp_path)
    assert facts["family"] is None
    assert "'mamba' is not supported" in facts["reason"]
    assert facts["storage"]["dtypes"] == {"bfloat16": {"tensors": 1, "bytes": 30}}
    assert CliRunner().invoke(app, ["inspect", str(tmp_path)]).exit_code == 0


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ([], "no checkpoint: neither config.json with safetensors"),
        (["config.json", "model-00001-of-00002.safetensors"], "config.json, but neither"),
        (["config.json", "pytorch_model-00001-of-00002.bin"], "save the weights as safetensors first"),
        (["model.gguf"], "GGUF"),
        (
            ["checkpoints/step_000002/trainer/common.pt", "export/hf/config.json"],
            "it holds export/hf, check",
        ),
    ],
)
def test_a_folder_that_is_no_checkpoint_is_told_what_it_is(tmp_path, files, says):
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("{}")
    with pytest.raises(ValueError, match=says):
        find_checkpoint(tmp_path)
    result = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert result.exit_code == 2
    assert says in result.output


def test_a_folder_with_a_config_alone_and_a_model_that_plans_know_are_described_by_the_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = published_config("Qwen3-VL-30B-A3B")["wrapped_in"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = inspect_checkpoint(tmp_path)
    assert (facts["model_type"], facts["family"], facts["tensors"]) == ("qwen3_vl_moe", "qwen3_moe", None)
    assert facts["architecture"] == inspect_checkpoint(Path("models/Qwen3-VL-30B-A3B"))["architecture"]
    printed = CliRunner().invoke(app, ["inspect", str(tmp_path)]).output
    assert "model_type  qwen3_vl_moe" in printed
    for model, config in (
        ("moonshotai/Kimi-K2.6", "Kimi-K2.5 as published, whose sizes Kimi-K2.6 has, in INT4"),
        ("models/Qwen3-30B-A3B-FP8", "Qwen3-30B-A3B as published, in block FP8"),
    ):
        assert inspect_checkpoint(Path(model))["config"].startswith(config)
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    facts = inspect_checkpoint(tmp_path)
    assert (facts["model_type"], facts["family"]) == ("mamba", None)
    assert "'mamba' is not supported" in facts["reason"]


@pytest.mark.parametrize(
    ("name", "width"),
    [
        ("Qwen3-30B-A3B", None),
        ("gpt-oss-20b", None),
        ("OLMoE-1B-7B-0924", None),
        ("GLM-4.5-Air", 10944),
        ("Qwen3-8B", 12288),
    ],
)
def test_the_width_of_a_dense_mlp_is_shown_where_a_layer_has_one(name, width, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert inspect_checkpoint(Path(name))["architecture"].get("dense MLP width") == width


def test_a_path_that_is_no_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for path, says in [(tmp_path / "file", "a file; a checkpoint is a folder"), (tmp_path / "no", "no such folder")]:
        with pytest.raises(ValueError, match=says):
            find_checkpoint(path)


def test_only_what_a_model_has_is_among_the_facts_of_its_architecture(tmp_path):
    write_toy("qwen3", tmp_path / "toy", SIZE, 0)
    assert inspect_checkpoint(tmp_path / "toy")["architecture"] == {
        "layers": 2,
        "hidden": 32,
        "attention heads": 4,
        "key-value heads": 2,
        "head dimension": 16,
        "dense MLP width": json.loads((tmp_path / "toy" / "config.json").read_text())["intermediate_size"],
        "vocabulary": json.loads((tmp_path / "toy" / "config.json").read_text())["vocab_size"],
        "tied embeddings": False,
        "rotary base": 1000.0,
        "longest position": json.loads((tmp_path / "toy" / "config.json").read_text())["max_position_embeddings"],
        "MTP layers": 0,
    }
