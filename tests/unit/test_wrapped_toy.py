"""Toys of wrapped models: what transformers loads whole, vision tower included, with the text model that we name."""

import json

import pytest
import torch
from safetensors.torch import load_file
from slimrl_tools.toy.toy import write_toy
from slimrl_tools.toy.toy_configs import ToySize
from toy_tools import SMALL
from transformers import AutoModelForImageTextToText, AutoTokenizer

from slimrl.checkpoints.checkpoint_reader import read_whole
from slimrl.checkpoints.hf_check import check_checkpoint
from slimrl.checkpoints.hf_checkpoint import open_hf_checkpoint
from slimrl.config.wrapper import WRAPPERS
from slimrl.toys.wrapped_toys import WRAPPED_TOYS


def test_every_kind_has_a_toy():
    assert {kind.removesuffix("_wrapped") for kind in WRAPPED_TOYS} == {wrapper.model_type for wrapper in WRAPPERS}


@pytest.mark.parametrize("kind", WRAPPED_TOYS)
def test_transformers_loads_a_wrapped_toy_with_every_weight(tmp_path, kind):
    count = write_toy(kind, tmp_path / "toy", SMALL, seed=1)
    model, info = AutoModelForImageTextToText.from_pretrained(tmp_path / "toy", output_loading_info=True)
    assert not any(info.values())
    others = ("visual", "vision_tower", "mm_projector")
    text = {name: value for name, value in model.state_dict().items() if not any(part in name for part in others)}
    assert sum(tensor.numel() for tensor in text.values()) == count
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "toy")
    assert model.config.text_config.vocab_size == len(tokenizer)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+1?"}], add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    assert torch.isfinite(model(input_ids=ids).logits).all()
    check_checkpoint(tmp_path / "toy")
    config = json.loads((tmp_path / "toy" / "config.json").read_text())
    assert config["model_type"] == kind.removesuffix("_wrapped")
    (weights,) = (tmp_path / "toy").glob("*.safetensors")
    towers = [tensor for name, tensor in load_file(weights).items() if any(part in name for part in others)]
    assert len({float(tensor.double().sum()) for tensor in towers}) == len(towers)


@pytest.mark.parametrize("wide", [48, 64, 32])
def test_transformers_takes_the_stacked_experts_as_we_do_though_some_are_square(tmp_path, wide):
    write_toy("qwen3_vl_moe", tmp_path / "toy", ToySize(layers=1, hidden=64, moe_intermediate=wide), seed=0)
    state = AutoModelForImageTextToText.from_pretrained(tmp_path / "toy").state_dict()
    experts = "layers.0.mlp.experts"
    with open_hf_checkpoint(tmp_path / "toy") as folder:
        for expert in range(8):
            names = ("gate_proj", "up_proj", "down_proj")
            gate, up, down = (read_whole(folder, f"model.{experts}.{expert}.{name}.weight") for name in names)
            stacked = state[f"model.language_model.{experts}.gate_up_proj"][expert]
            assert torch.equal(stacked, torch.cat([gate, up]))
            assert torch.equal(state[f"model.language_model.{experts}.down_proj"][expert], down)
