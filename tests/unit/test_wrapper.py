"""Configs and tensors of wrapped models: read as the text model's, and written as they were."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from slimrl_tools.derive.quantize import quantization
from slimrl_tools.derive.rewrite import write_checkpoint
from slimrl_tools.toy.toy import write_toy
from toy_tools import SMALL

from slimrl.agent.chat.stop_tokens import _eos
from slimrl.checkpoints.hf_check import check_checkpoint
from slimrl.checkpoints.hf_checkpoint import open_stored
from slimrl.config.check import check_recipe
from slimrl.config.hf_config import read_hf_config, write_hf_config
from slimrl.config.load import read_recipe
from slimrl.config.wrapper import WRAPPED_IN, stored_config, text_config, wrapper_of
from slimrl.data.model_weights import TensorSpec
from slimrl.models.adapters import adapter_map
from slimrl.models.engine_slice import EngineShape
from slimrl.models.family import family_of
from slimrl.models.hf_config import BLOCK_FP8, plain_config, published_config
from slimrl.models.published_index import published_tensors
from slimrl.models.wrapped_layout import WrappedLayout
from slimrl.quantization.fp8 import BlockFp8
from slimrl.toys.wrapped_toys import WRAPPED_TOYS

TEXT = {"model_type": "qwen3_vl_moe_text", "hidden_size": 4, "moe_intermediate_size": 3, "dtype": "bfloat16"}


def outer(**more: Any) -> dict[str, Any]:
    return {"model_type": "qwen3_vl_moe", "text_config": TEXT, "vision_config": {"dtype": "bfloat16"}, **more}


def test_the_text_models_config_is_that_of_its_family():
    read = text_config(outer(eos_token_id=7, vision_start_token_id=1))
    assert read["model_type"] == "qwen3_moe"
    assert (read["hidden_size"], read["eos_token_id"]) == (4, 7)
    assert "vision_start_token_id" not in read
    # Its own value comes first, under whichever of the two names.
    read_in_bf16 = text_config(outer(torch_dtype="float32"))
    assert (read_in_bf16["dtype"], "torch_dtype" in read_in_bf16) == ("bfloat16", False)
    # transformers' class has no other.
    assert read["norm_topk_prob"] is True
    assert text_config(read) is read
    plain = {"model_type": "qwen3", "text_config": {}}
    assert text_config(plain) is plain


def test_the_config_around_says_whether_the_head_is_tied():
    tied_within = {**TEXT, "tie_word_embeddings": True}
    assert text_config(outer(text_config=tied_within))["tie_word_embeddings"] is False
    assert text_config(outer(text_config=tied_within, tie_word_embeddings=True))["tie_word_embeddings"] is True
    kimi = {"model_type": "kimi_k25", "text_config": {"tie_word_embeddings": True}}
    assert text_config(kimi)["tie_word_embeddings"] is True
    assert text_config({**kimi, "tie_word_embeddings": False})["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    "config",
    [
        outer(),
        outer(dtype="bfloat16", tie_word_embeddings=True, quantization_config={"quant_method": "x"}),
        outer(text_config={**TEXT, "dtype": None}, torch_dtype="float16"),
        {"model_type": "kimi_k25", "text_config": {}},
    ],
)
def test_a_config_that_nothing_changed_is_written_as_it_was(tmp_path: Path, config: dict[str, Any]):
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_hf_config(tmp_path, read_hf_config(tmp_path))
    assert json.loads((tmp_path / "config.json").read_text()) == config


def test_changes_are_written_where_they_were_read():
    given = outer(dtype="bfloat16", quantization_config={"quant_method": "x"})
    written = stored_config(plain_config(text_config(given), "float32"))
    assert written == {
        **outer(dtype="float32"),
        "text_config": {**TEXT, "dtype": "float32"},
    }
    sliced = stored_config({**text_config(given), "num_hidden_layers": 2})
    assert sliced == {**given, "text_config": {**TEXT, "num_hidden_layers": 2}}
    # The one that the text model inherits, and no other beside it.
    inherited = outer(text_config={"model_type": "qwen3_vl_moe_text"}, torch_dtype="bfloat16")
    written = stored_config(plain_config(text_config(inherited), "float32"))
    assert written == {**inherited, "torch_dtype": "float32"}
    assert given["quantization_config"] == {"quant_method": "x"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "qwen3_vl"}, "'qwen3_vl' needs an object text_config"),
        ({"model_type": "qwen3_vl", "text_config": {"model_type": "llama"}}, "'llama' is not supported in a qwen3_vl"),
    ],
)
def test_a_wrapper_of_something_else_is_refused_with_its_folder(tmp_path: Path, config: dict[str, Any], message: str):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"^{tmp_path}: config.json: .*{message}"):
        read_hf_config(tmp_path)


def test_a_key_that_the_text_models_config_lacks_is_named_where_it_belongs():
    config = published_config("Qwen3-VL-8B")
    lacks = {name: value for name, value in config.items() if name != "num_hidden_layers"}
    for given, said in ((lacks, "no text_config.num_hidden_layers"), ({"model_type": "qwen3"}, "no num_hidden_layers")):
        with pytest.raises(ValueError, match=f"config.json: {said}"):
            family_of(given).weight_map(given)


def test_engines_know_the_family_by_their_own_configs():
    from transformers import AutoConfig

    stored = published_config("Qwen3-VL-30B-A3B")[WRAPPED_IN]
    config = AutoConfig.for_model(**stored)
    for given in (config, config.text_config):
        shape = EngineShape.of_config(given, 1)
        assert (shape.model_type, shape.num_experts, shape.expert_width) == ("qwen3_moe", 128, 768)


def test_stop_tokens_are_found_in_either_config(tmp_path: Path):
    path = tmp_path / "config.json"
    for config, eos in ((outer(eos_token_id=5), 5), (outer(text_config={**TEXT, "eos_token_id": 6}), 6), ({}, None)):
        path.write_text(json.dumps(config))
        assert _eos(path) == eos


@pytest.mark.parametrize("kind", WRAPPED_TOYS)
def test_a_tensor_that_is_neither_texts_nor_carried_is_refused(tmp_path: Path, kind: str):
    write_toy(kind, tmp_path / "toy", SMALL, seed=0)
    (file,) = (tmp_path / "toy").glob("*.safetensors")
    (tmp_path / "toy" / "model.safetensors.index.json").unlink()
    tensors = load_file(file)
    file.unlink()
    save_file({**tensors, "audio.weight": torch.zeros(2)}, tmp_path / "toy" / "model.safetensors")
    with pytest.raises(ValueError, match=r"audio.weight: not part of this model"):
        check_checkpoint(tmp_path / "toy")


def test_two_names_of_one_tensor_are_refused():
    names = ("model.language_model.norm.weight", "model.norm.weight")
    specs = {name: TensorSpec(name=name, shape=(2,), dtype="float32") for name in names}
    with pytest.raises(ValueError, match=r"are both model\.norm\.weight"):
        WrappedLayout(text_config(outer()), specs)


def test_stacked_experts_of_other_sizes_are_refused():
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    with pytest.raises(ValueError, match=r"stacked experts do not fit config\.json, hidden_size 4, 3 per expert"):
        WrappedLayout(text_config(outer()), {name: TensorSpec(name=name, shape=(2, 6, 5), dtype="float32")})


@pytest.fixture
def in_fp8(tmp_path: Path) -> Path:
    """A wrapped model in block FP8 as `slimrl-tools quantize` writes it."""
    write_toy("qwen3_vl_moe", tmp_path / "toy", SMALL, seed=0)
    with open_stored(tmp_path / "toy") as folder:
        write_checkpoint(quantization(folder, (16, 16), ["self_attn"]), tmp_path / "fp8")
    return tmp_path / "fp8"


def test_a_wrapped_model_in_block_fp8_has_the_names_and_the_config_of_released_ones(in_fp8: Path):
    tensors = {name: tensor for file in in_fp8.glob("*.safetensors") for name, tensor in load_file(file).items()}
    layer = "model.language_model.layers.0."
    quantised = {name for name, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn}
    assert f"{layer}mlp.experts.0.up_proj.weight" in quantised
    assert tensors.keys() >= {f"{name}_scale_inv" for name in quantised}
    assert not any("visual" in name or "self_attn" in name for name in quantised)
    config = json.loads((in_fp8 / "config.json").read_text())
    assert "quantization_config" not in config["text_config"]
    kept = config["quantization_config"]["modules_to_not_convert"]
    assert {f"{layer}self_attn.q_proj", f"{layer}mlp.gate", "model.visual.blocks.0.attn.qkv", "lm_head"} <= {*kept}
    # What is read of it is what the family's names say.
    fp8 = BlockFp8.of_config(read_hf_config(in_fp8))
    assert not fp8.converts("model.layers.0.self_attn.q_proj.weight")
    assert fp8.converts("model.layers.0.mlp.experts.0.up_proj.weight")
    check_checkpoint(in_fp8)


def test_block_fp8_that_sglang_or_an_export_would_misread_is_refused(in_fp8: Path):
    config = json.loads((in_fp8 / "config.json").read_text())
    within = {**config, "text_config": {**config["text_config"], "quantization_config": config["quantization_config"]}}
    del within["quantization_config"]
    (in_fp8 / "config.json").write_text(json.dumps(within))
    with pytest.raises(ValueError, match=r"quantization_config in text_config, where SGLang does not find it"):
        open_stored(in_fp8)
    (in_fp8 / "config.json").write_text(json.dumps(config))
    name = "model.visual.blocks.0.attn.qkv.weight"
    for file in in_fp8.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            save_file({**tensors, name: tensors[name].to(torch.float8_e4m3fn)}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=f"{name} is float8; exports are plain"):
        open_stored(in_fp8)


def test_block_fp8_of_a_kimi_k25_is_refused(tmp_path: Path):
    write_toy("kimi_k25", tmp_path / "toy", SMALL, seed=0)
    with open_stored(tmp_path / "toy") as folder, pytest.raises(ValueError, match="a kimi_k25 in block FP8 is not"):
        quantization(folder, (16, 16), [])
    config = json.loads((tmp_path / "toy" / "config.json").read_text())
    (tmp_path / "toy" / "config.json").write_text(json.dumps({**config, "quantization_config": BLOCK_FP8}))
    with pytest.raises(ValueError, match=r"a kimi_k25 in block FP8 is not supported: SGLang looks for the modules"):
        open_stored(tmp_path / "toy")


def test_stacked_scales_that_do_not_fit_their_matrices_are_refused():
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    config = {**text_config(outer()), "quantization_config": {**BLOCK_FP8, "weight_block_size": [2, 2]}}

    def layout(*scales: int) -> WrappedLayout:
        specs = [
            TensorSpec(name=name, shape=(2, 6, 4), dtype="float8_e4m3fn"),
            TensorSpec(name=f"{name}_scale_inv", shape=scales, dtype="float32"),
        ]
        return WrappedLayout(config, {spec.name: spec for spec in specs})

    with pytest.raises(ValueError, match=r"scales \[2, 3, 3\], tiles of \[2, 2\] need \[2, 3, 2\]"):
        layout(2, 3, 3)
    with pytest.raises(ValueError, match=r"the 3 rows of an expert's gate are no whole tiles of 2"):
        layout(2, 3, 2)


def test_adapters_of_a_wrapped_model_are_named_as_its_checkpoint_names_their_layers():
    config = published_config("Qwen3-VL-8B")
    words = ["trainer.lora.rank=8", "model.path=models/Qwen3-VL-8B"]
    loaded, _ = read_recipe("recipes/qwen3/qwen3_8b_gspo.yaml", words, "train")
    assert loaded is not None
    assert not [problem for problem in check_recipe(loaded.recipe, config, "train") if "lora" in problem.key]
    weight_map = family_of(config).weight_map(config)
    stored = {
        name.rpartition(".lora_")[0] for name in adapter_map(weight_map, ["q_proj"], 8, wrapper_of(config)).hf_tensors
    }
    released = published_tensors("Qwen3-VL-8B")
    assert stored == {
        f"base_model.model.{name.removesuffix('.weight')}" for name in released if name.endswith(".q_proj.weight")
    }
