"""Weights between Hugging Face and Megatron: exports, and what a broken checkpoint is told."""

import json
import shutil

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from small_models import VOCAB, small_model
from transformers import AutoModelForCausalLM
from weight_cases import join, loaded_chunks

from slimrl.config.schema.precision import Precision
from slimrl.config.schema.trainer import ParallelConfig
from slimrl.trainer.build import unwrap
from slimrl.trainer.checkpointing.export import export_hf
from slimrl.trainer.weight_source import MegatronWeightSource
from slimrl.trainer.weights import load_hf_weights

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

BESIDE_THE_WEIGHTS = ("tiktoken.model", "tokenization_x.py", "modeling_x.py")
"""Files that only code with these names knows how to use; an export without them does not load."""


def refusals_and_export(rank, world_size, port, path, broken, out):
    """One rank: an export, the refusal to overwrite it, and what a broken checkpoint is told."""
    join(rank, world_size, port)
    chunks, family, hf_config = loaded_chunks(path, ParallelConfig(), Precision.bf16)
    messages = {}
    export_hf(MegatronWeightSource(chunks, family, hf_config, dtype="bfloat16"), path, out)
    with pytest.raises(ValueError, match="never overwrites") as refused:
        export_hf(MegatronWeightSource(chunks, family, hf_config), path, out)
    messages["overwrite"] = str(refused.value)
    with pytest.raises(ValueError, match="does not match") as mismatch:
        load_hf_weights(chunks, broken, family, hf_config)
    messages["broken"] = str(mismatch.value)
    float32 = {name: tensor.dtype for name, tensor in MegatronWeightSource(chunks, family, hf_config).tensors()}
    assert set(float32.values()) == {torch.float32}
    assert unwrap(chunks[0]).vocab_size == VOCAB
    dist.destroy_process_group()
    return messages


def test_an_export_is_a_checkpoint_that_transformers_loads_and_a_broken_one_is_refused_in_full(tmp_path):
    path = small_model("qwen3_moe", tmp_path / "hf")
    for name in BESIDE_THE_WEIGHTS:
        (path / name).write_text(name)
    broken = tmp_path / "broken"
    broken.mkdir()
    shutil.copyfile(path / "config.json", broken / "config.json")
    tensors = load_file(path / "model.safetensors")
    missing = tensors.pop("model.layers.1.self_attn.k_norm.weight")
    tensors["model.layers.1.self_attn.k_bias"] = missing
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:100].clone()
    save_file(tensors, broken / "model.safetensors")
    frequencies = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file(load_file(path / "model.safetensors") | {frequencies: torch.rand(8)}, path / "model.safetensors")
    out = tmp_path / "out" / "hf"

    (messages,) = run_ranks(refusals_and_export, 1, path, broken, out, timeout_s=90)

    assert "model.layers.1.self_attn.k_norm.weight: missing" in messages["broken"]
    assert "model.layers.1.self_attn.k_bias: not part of this model" in messages["broken"]
    assert "lm_head.weight: shape [100, 32], config.json implies [131, 32]" in messages["broken"]
    assert [file.name for file in out.parent.iterdir()] == ["hf"]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert frequencies not in index["weight_map"]
    model = AutoModelForCausalLM.from_pretrained(out)
    original = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    assert index["metadata"]["total_size"] == 2 * sum(parameter.numel() for parameter in model.parameters())
    assert model.dtype == torch.bfloat16
    for name, tensor in original.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert (out / "tokenizer.json").read_text() == "{}"
    assert all((out / name).read_text() == name for name in BESIDE_THE_WEIGHTS)
