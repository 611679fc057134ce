"""Toy checkpoints: what transformers loads, the same for the same seed, complete or absent."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from slimrl_tools.cli import app
from slimrl_tools.toy.toy import write_toy
from slimrl_tools.toy.toy_configs import TOYS, ToySize
from toy_tools import SMALL
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from slimrl.checkpoints.hf_check import check_checkpoint

WEIGHTS = "model-00001-of-00001.safetensors"


@pytest.mark.parametrize("family", TOYS)
def test_transformers_loads_the_toy_with_every_weight_and_its_chat_template(tmp_path, family):
    count = write_toy(family, tmp_path / "toy", SMALL, seed=1)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "toy", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.dtype == torch.float32
    assert sum(tensor.numel() for tensor in model.state_dict().values()) == count
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "toy")
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+1?"}], add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    assert torch.isfinite(model(ids).logits).all()


@pytest.mark.parametrize("family", TOYS)
def test_every_norm_of_a_toy_multiplies_by_one(tmp_path, family):
    write_toy(family, tmp_path / "toy", SMALL, seed=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "toy")
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    assert norms
    for norm in norms:
        squares = norm(torch.randn(3, len(norm.weight))).square().mean(-1)
        torch.testing.assert_close(squares, torch.ones(3), atol=1e-4, rtol=0)
    gated = [module for module in model.modules() if type(module).__name__.endswith("RMSNormGated")]
    assert all(torch.equal(norm.weight, torch.ones(len(norm.weight))) for norm in gated)


@pytest.mark.parametrize("family", ["glm4_moe", "glm4_moe_lite", "deepseek_v3"])
def test_layers_for_multi_token_prediction_are_whole_and_repeat_the_embedding(tmp_path, family):
    write_toy(family, tmp_path / "toy", replace(SMALL, mtp_layers=1), seed=1)
    check_checkpoint(tmp_path / "toy")
    tensors = load_file(tmp_path / "toy" / WEIGHTS)
    assert torch.equal(tensors["model.layers.2.embed_tokens.weight"], tensors["model.embed_tokens.weight"])
    assert torch.equal(tensors["model.layers.2.shared_head.head.weight"], tensors["lm_head.weight"])
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "toy", output_loading_info=True)
    assert not info["missing_keys"]


def test_the_default_toy_has_the_promised_size(tmp_path):
    count = write_toy("qwen3_moe", tmp_path / "toy", ToySize(), seed=0)
    assert 1e6 < count < 3e6


def test_the_same_seed_gives_the_same_file_and_another_another(tmp_path):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        write_toy("qwen3_moe", tmp_path / name, SMALL, seed=seed)
    a, b, c = ((tmp_path / name / WEIGHTS).read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_the_words_of_a_tasks_text_are_tokens_and_others_are_not(tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text('{"content": "Bamboo grows, says Wolfgang."}\n' * 3)
    for name, given in (("plain", None), ("task", text)):
        write_toy("qwen3_moe", tmp_path / name, SMALL, seed=1, text=given)
    plain, task = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("plain", "task"))
    # Without the punctuation around them, so that a word is the same token wherever it stands.
    assert task.convert_ids_to_tokens(task.encode(" Wolfgang, Wolfgang")) == ["ĠWolfgang", ",", "ĠWolfgang"]
    assert len(plain.encode(" Wolfgang")) > 3
    for said in (" Zebra? 12+3 \\boxed{7}", "é ✓\n"):
        assert task.decode(task.encode(said)) == said
    assert load_file(tmp_path / "task" / WEIGHTS)["model.embed_tokens.weight"].shape[0] == len(task)


def test_no_two_matrices_are_equal(tmp_path):
    write_toy("qwen3_moe", tmp_path / "toy", SMALL, seed=0)
    tensors = [t for name, t in load_file(tmp_path / "toy" / WEIGHTS).items() if not name.endswith("norm.weight")]
    assert len({float(tensor.double().sum()) for tensor in tensors}) == len(tensors)


def test_the_command_refuses_with_exit_code_2(tmp_path):
    runner = CliRunner()
    out = tmp_path / "toy"
    out.mkdir()
    cases = {
        (str(out),): "it is not overwritten",
        (str(tmp_path / "x"), "--text", str(tmp_path / "absent.jsonl")): "absent.jsonl: no such file",
        (str(tmp_path / "x"), "--heads", "3"): "--kv-heads 2 does not divide --heads 3",
        (str(tmp_path / "x"), "--experts", "1"): "--experts-per-token 2 is more than --experts 1",
        (
            str(tmp_path / "x"),
            "--mtp-layers",
            "1",
        ): "qwen3_moe has no layers for multi-token",
    }
    for arguments, message in cases.items():
        result = runner.invoke(app, ["toy", "qwen3_moe", *arguments])
        assert result.exit_code == 2
        assert message in result.output
    assert runner.invoke(app, ["toy", "gpt2", str(tmp_path / "x")]).exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["toy"]


def test_the_longest_context_is_an_option(tmp_path):
    runner = CliRunner()
    small = ("--layers", "1", "--hidden", "8", "--head-dim", "4", "--moe-intermediate", "8")
    for family, words, longest in (("qwen3_moe", (), 1024), ("deepseek_v3", ("--max-position", "65536"), 65536)):
        out = tmp_path / family
        result = runner.invoke(app, ["toy", family, str(out), *small, *words])
        assert result.exit_code == 0, result.output
        config = json.loads((out / "config.json").read_text())
        assert config["max_position_embeddings"] == longest
    assert config["rope_scaling"]["original_max_position_embeddings"] == 65536 // 4
    odd = runner.invoke(app, ["toy", "deepseek_v3", str(tmp_path / "odd"), "--max-position", "6"])
    assert odd.exit_code == 2
    assert "--max-position 6: deepseek_v3 extends a quarter of it" in odd.output
