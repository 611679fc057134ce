"""Checkpoints that megatron-core itself writes of its own GPTModel, by its own spec and defaults, converted."""

import json
import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from slimrl_tools.convert.megatron_to_hf import megatron_to_hf
from slimrl_tools.convert.options import Options
from stock_megatron import DIM, EXPERTS, GROUPS, HEADS, HIDDEN, LAYERS, VOCAB, WIDE, save_stock
from transformers import AutoModelForCausalLM

from slimrl.engines.servers.ports import free_port

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "moe_intermediate_size": WIDE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": DIM,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "dtype": "float32",
}
DENSE = {name: value for name, value in CONFIG.items() if "expert" not in name and "moe" not in name} | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
}

ITERATION = "iter_0000010"
CASES = {
    "experts in every layer, its default": (True, 1, None),
    "experts in every layer, listed": (True, [1] * LAYERS, None),
    "experts, layer by layer by its metadata": (True, 1, {"non_homogeneous_layers": True}),
    "dense": (False, 1, None),
    "dense, layer by layer by its metadata": (False, 1, {"non_homogeneous_layers": True}),
}


@pytest.fixture(scope="module")
def stock(tmp_path_factory) -> tuple[Path, dict]:
    """The folder of each case, by its number, and its weights, by its name; written by a fresh process."""
    root = tmp_path_factory.mktemp("stock")
    folders = {name: (root / str(number) / ITERATION, *case) for number, (name, case) in enumerate(CASES.items())}
    arguments = (free_port(), folders, root / "weights")
    process = multiprocessing.get_context("spawn").Process(target=save_stock, args=arguments)
    process.start()
    try:
        process.join(240)
        assert process.exitcode == 0
    finally:
        process.kill()
    return root, torch.load(root / "weights")


def config_folder(folder: Path, config: dict) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", CASES)
def test_what_megatron_core_saves_of_its_own_model_becomes_the_same_model(tmp_path, stock, name):
    root, weights = stock
    experts, said = CASES[name][0], []
    given = root / str(list(CASES).index(name))
    (given / "latest_checkpointed_iteration.txt").write_text("10\n")
    hf = config_folder(tmp_path / "hf", CONFIG if experts else DENSE)
    megatron_to_hf(given, tmp_path / "out", Options(), hf_dir=hf, say=said.append)
    assert said == [f"{given}: the newest iteration is taken, {ITERATION}"]
    (file,) = (tmp_path / "out").glob("*.safetensors")
    stored, expected = load_file(file), dict(by_hand(weights[name], experts))
    assert stored.keys() == expected.keys()
    assert not [tensor for tensor, value in expected.items() if not torch.equal(stored[tensor], value)]
    # transformers finds its whole model in it.
    _, found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]


def by_hand(weights: dict[str, torch.Tensor], experts: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Megatron's layout taken apart: a group's queries, key and value lie together, and gate above up."""
    yield "model.embed_tokens.weight", weights["embedding.word_embeddings.weight"]
    yield "model.norm.weight", weights["decoder.final_layernorm.weight"]
    yield "lm_head.weight", weights["output_layer.weight"]
    for layer in range(LAYERS):
        hf, mcore = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        attention = mcore + "self_attention."
        yield hf + "input_layernorm.weight", weights[mcore + "input_layernorm.weight"]
        yield hf + "post_attention_layernorm.weight", weights[mcore + "pre_mlp_layernorm.weight"]
        yield hf + "self_attn.q_norm.weight", weights[attention + "q_layernorm.weight"]
        yield hf + "self_attn.k_norm.weight", weights[attention + "k_layernorm.weight"]
        yield hf + "self_attn.o_proj.weight", weights[attention + "linear_proj.weight"]
        groups, edge = weights[attention + "linear_qkv.weight"].view(GROUPS, -1, HIDDEN), HEADS // GROUPS * DIM
        yield hf + "self_attn.q_proj.weight", groups[:, :edge].reshape(-1, HIDDEN)
        yield hf + "self_attn.k_proj.weight", groups[:, edge : edge + DIM].reshape(-1, HIDDEN)
        yield hf + "self_attn.v_proj.weight", groups[:, edge + DIM :].reshape(-1, HIDDEN)
        if experts:
            yield hf + "mlp.gate.weight", weights[mcore + "mlp.router.weight"]
        for expert in range(EXPERTS if experts else 1):
            to, of = (f"experts.{expert}.", f"experts.local_experts.{expert}.") if experts else ("", "")
            gate, up = weights[f"{mcore}mlp.{of}linear_fc1.weight"].chunk(2)
            yield f"{hf}mlp.{to}gate_proj.weight", gate
            yield f"{hf}mlp.{to}up_proj.weight", up
            yield f"{hf}mlp.{to}down_proj.weight", weights[f"{mcore}mlp.{of}linear_fc2.weight"]


def test_a_checkpoint_of_alike_layers_is_none_of_a_model_with_dense_ones(tmp_path, stock):
    hf = config_folder(tmp_path / "hf", {**CONFIG, "mlp_only_layers": [0]})
    with pytest.raises(ValueError, match=r"stores all layers alike, config\.json has layers with and without experts"):
        megatron_to_hf(stock[0] / "0" / ITERATION, tmp_path / "out", Options(), hf_dir=hf)
