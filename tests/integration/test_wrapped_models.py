"""Wrapped models as text: the logits of transformers' wrapped models, and checkpoints that come back as they were."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from slimrl_tools.cli import app
from slimrl_tools.convert.hf_to_megatron import hf_to_megatron
from slimrl_tools.convert.megatron_to_hf import megatron_to_hf
from slimrl_tools.convert.options import Options
from slimrl_tools.toy.toy import ToySize, write_toy
from small_models import VOCAB
from transformers import AutoModelForImageTextToText
from typer.testing import CliRunner
from weight_cases import change_layout, join, loaded_chunks, packed_logits
from wrapped_models import WRAPPED, experts_apart, wrapped_model

from slimrl.checkpoints.hf_checkpoint import open_stored
from slimrl.config.schema.trainer import ParallelConfig
from slimrl.trainer.checkpointing.export import export_hf
from slimrl.trainer.weight_source import MegatronWeightSource

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

BOUNDS = [0, 17, 40, 41, 161]
"""Bounds of four sequences packed one after the other."""


def models(folder: Path) -> list[Path]:
    """Every kind as it is released, and experts in other forms."""
    return [
        *(wrapped_model(name, folder / name) for name in WRAPPED),
        wrapped_model("qwen3_vl_moe", folder / "saved_by_transformers", released=False),
        experts_apart(wrapped_model("qwen3_vl_moe", folder / "experts_apart")),
    ]


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def assert_same_checkpoint(path: Path, other: Path) -> None:
    tensors, others = tensors_of(path), tensors_of(other)
    assert tensors.keys() == others.keys()
    assert not [name for name, tensor in tensors.items() if tensor.dtype != others[name].dtype]
    assert not [name for name, tensor in tensors.items() if not torch.equal(tensor, others[name])]
    assert json.loads((path / "config.json").read_text()) == json.loads((other / "config.json").read_text())


def test_every_kind_gives_the_logits_of_transformers_for_text(tmp_path):
    paths = [path for path in models(tmp_path) if path.name != "experts_apart"]
    tokens_T = torch.randint(0, VOCAB, (BOUNDS[-1],), generator=torch.Generator().manual_seed(5))
    (results,) = run_ranks(packed_logits, 1, paths, tokens_T, BOUNDS, timeout_s=150)
    for path, logits_TV in zip(paths, results, strict=True):
        model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
        with torch.no_grad():
            expected = [model(input_ids=tokens_T[None, a:b]).logits[0] for a, b in pairwise(BOUNDS)]
        difference = (torch.from_numpy(logits_TV) - torch.cat(expected)).abs().max()
        print(path.name, float(difference))
        assert difference < 1e-4, (path.name, difference)


def exports(rank, world_size, port, cases):
    join(rank, world_size, port)
    for src, out, parallel in cases:
        change_layout(parallel)
        chunks, family, hf_config = loaded_chunks(src, parallel)
        export_hf(MegatronWeightSource(chunks, family, hf_config, window_bytes=20_000), src, out)
    dist.destroy_process_group()


def test_an_export_is_the_wrapped_checkpoint_again(tmp_path):
    cases = [
        (path, tmp_path / "out" / path.name, ParallelConfig(tensor=2, sequence=True, expert=2 if moe else 1))
        for path in models(tmp_path)
        for moe in [path.name not in ("qwen3_vl", "qwen3_vl_tied", "qwen3_5_wrapped")]
    ]
    (tmp_path / "out").mkdir()
    run_ranks(exports, 2, cases, timeout_s=150)
    for src, out, _ in cases:
        assert_same_checkpoint(src, out)


def test_a_conversion_there_and_back_gives_the_wrapped_checkpoint(tmp_path):
    for src in models(tmp_path):
        middle, back = (tmp_path / f"{src.name}_{name}" for name in ("megatron", "back"))
        hf_to_megatron(src, middle, ParallelConfig(pipeline=2), Options())
        with pytest.raises(ValueError, match="Give that one with --hf"):
            megatron_to_hf(middle, back, Options())
        megatron_to_hf(middle, back, Options(), hf_dir=src, shard_bytes=20_000)
        assert_same_checkpoint(src, back)


@pytest.mark.parametrize("kind", ["qwen3_5_wrapped", "qwen3_5_moe_wrapped"])
def test_layers_for_multi_token_prediction_beside_the_text_model_come_back_too(tmp_path, kind):
    src, middle, back = (tmp_path / name for name in ("src", "megatron", "back"))
    write_toy(kind, src, ToySize(layers=4, hidden=64, mtp_layers=1), seed=0)
    assert any(name.startswith("mtp.") for name in tensors_of(src))
    hf_to_megatron(src, middle, ParallelConfig(), Options())
    megatron_to_hf(middle, back, Options(), hf_dir=src)
    assert_same_checkpoint(src, back)
    result = CliRunner().invoke(app, ["verify", str(src), str(middle), "--logits", "2"])
    assert result.exit_code == 0, result.output


def test_verify_compares_the_tensors_of_other_modalities(tmp_path):
    src = wrapped_model("qwen3_vl", tmp_path / "src")
    other = wrapped_model("qwen3_vl", tmp_path / "other")
    runner = CliRunner()
    assert runner.invoke(app, ["verify", str(src), str(other)]).exit_code == 0
    tensors = load_file(other / "model.safetensors")
    tensors["model.visual.patch_embed.proj.bias"] += 1
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    result = runner.invoke(app, ["verify", str(src), str(other)])
    assert result.exit_code != 0
    assert "model.visual.patch_embed.proj.bias" in result.output


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "kimi_k25"])
def test_inspect_and_verify_know_the_text_model(tmp_path, name):
    src = wrapped_model(name, tmp_path / "src")
    runner = CliRunner()
    result = runner.invoke(app, ["inspect", str(src), "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.output)
    with open_stored(src) as folder:
        text = len({place.stored for place in folder.layout.places.values()})
    assert facts["tensors"]["unknown"]["count"] == facts["tensors"]["missing"]["count"] == 0
    assert facts["wrapper"] == {"model_type": name, "other_tensors": len(load_file(src / "model.safetensors")) - text}
    assert facts["family"] == {"qwen3_vl_moe": "qwen3_moe", "kimi_k25": "deepseek_v3"}[name]
    hf_to_megatron(src, tmp_path / "megatron", ParallelConfig(), Options())
    result = runner.invoke(app, ["verify", str(src), str(tmp_path / "megatron"), "--logits", "2"])
    assert result.exit_code == 0, result.output


def test_the_first_layers_of_a_wrapped_model_are_one_too(tmp_path):
    src, out = wrapped_model("qwen3_vl_moe", tmp_path / "src"), tmp_path / "out"
    result = CliRunner().invoke(app, ["slice-layers", str(src), str(out), "--layers", "2"])
    assert result.exit_code == 0, result.output
    kept, whole = tensors_of(out), tensors_of(src)
    layers = [f".layers.{layer}." for layer in (2, 3)]
    assert kept.keys() == {name for name in whole if not any(part in name for part in layers)}
    assert all(torch.equal(tensor, whole[name]) for name, tensor in kept.items())
    model, loading = AutoModelForImageTextToText.from_pretrained(out, output_loading_info=True)
    assert model.config.text_config.num_hidden_layers == 2
    assert not any(loading.values())
