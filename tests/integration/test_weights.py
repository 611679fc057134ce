"""Weights from Hugging Face into Megatron and back, bit for bit, under several parallel layouts."""

import json
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.packed_seq_params import PackedSeqParams
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from slimrl.config.schema import OptimizerConfig, ParallelConfig, Precision, TrainerConfig
from slimrl.models.family import family_of
from slimrl.models.hf_config import published_config, read_hf_config
from slimrl.trainer.build import _gpt, build_model, transformer_config, unwrap
from slimrl.trainer.export import export_hf
from slimrl.trainer.parallel import init_model_parallel, init_parallel
from slimrl.trainer.weight_source import MegatronWeightSource
from slimrl.trainer.weights import load_hf_weights, local_weights

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

TIMEOUT_S = 60.0
SHARED = dict(
    vocab_size=131,  # odd: every tensor-parallel layout has padding rows
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    initializer_range=0.1,
)
LAYOUTS_OF_2 = {
    "tp2_sp": ParallelConfig(tensor=2, sequence=True),
    "tp2_sp_etp2": ParallelConfig(tensor=2, sequence=True, expert_tensor=2),
    "pp2": ParallelConfig(pipeline=2),
    "ep2": ParallelConfig(expert=2),
    "etp2": ParallelConfig(expert_tensor=2),
}
LAYOUTS_OF_4 = {
    "tp2_sp_ep2_dp2": ParallelConfig(tensor=2, sequence=True, expert=2),
    "pp2_ep2": ParallelConfig(pipeline=2, expert=2),
    "tp2_sp_pp2_etp2": ParallelConfig(tensor=2, sequence=True, pipeline=2, expert_tensor=2),
    "tp2_sp_pp2_vpp2_ep2": ParallelConfig(tensor=2, sequence=True, pipeline=2, virtual_pipeline=2, expert=2),
    "cp2_ep4": ParallelConfig(context=2, expert=4),
}


def save_checkpoint(path: Path, **changes) -> Path:
    """A random checkpoint as transformers writes it, norms included."""
    kind = changes.pop("kind", "moe")
    if kind == "moe":
        extra = dict(moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True)
        config = Qwen3MoeConfig(**{**SHARED, **extra, **changes})
    else:
        config = Qwen3Config(**{**SHARED, **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.1)
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    return path


def trainer_config(parallel: ParallelConfig, precision: Precision = Precision.fp32) -> TrainerConfig:
    return TrainerConfig(
        parallel=parallel, precision=precision, max_tokens_per_rank=64, optimizer=OptimizerConfig(lr=1e-3)
    )


def loaded_chunks(path: Path, parallel: ParallelConfig, precision: Precision = Precision.fp32):
    hf_config = read_hf_config(path)
    family = family_of(hf_config)
    chunks = build_model(trainer_config(parallel, precision), family.megatron_config(hf_config))
    load_hf_weights(chunks, path, family, hf_config)
    return chunks, family, hf_config


def round_trip(rank, world_size, port, path, layouts):
    """Seconds per export by layout; raises where a tensor comes back changed."""
    init_parallel(
        ParallelConfig(), rank=rank, world_size=world_size, master_addr="127.0.0.1", master_port=port,
        timeout_s=TIMEOUT_S, seed=0,
    )  # fmt: skip
    expected = load_file(path / "model.safetensors")
    seconds = {}
    for name, parallel in layouts.items():
        mpu.destroy_model_parallel()
        init_model_parallel(parallel, timeout_s=TIMEOUT_S, seed=0)
        chunks, family, hf_config = loaded_chunks(path, parallel)
        source = MegatronWeightSource(chunks, family, hf_config, window_bytes=40_000)
        start = time.perf_counter()
        seen = {}
        for tensor_name, tensor in source.tensors():
            assert (tensor is None) == (rank != 0)
            seen[tensor_name] = tensor if tensor is None else tensor.clone()
        seconds[name] = time.perf_counter() - start
        assert list(seen) == [spec.name for spec in source.specs()]
        if rank == 0:
            assert set(seen) == set(expected)
            wrong = [key for key, tensor in seen.items() if not torch.equal(tensor, expected[key])]
            assert not wrong, (name, wrong)
    dist.destroy_process_group()
    return seconds


def test_weights_return_bit_for_bit_under_layouts_of_two_ranks(tmp_path):
    run_ranks(round_trip, 2, save_checkpoint(tmp_path / "hf"), LAYOUTS_OF_2, timeout_s=120)


def test_weights_return_bit_for_bit_under_layouts_of_four_ranks(tmp_path):
    run_ranks(round_trip, 4, save_checkpoint(tmp_path / "hf"), LAYOUTS_OF_4, timeout_s=150)


@pytest.mark.full
@pytest.mark.parametrize("tied", [False, True])
def test_the_dense_family_and_tied_embeddings_return_bit_for_bit(tmp_path, tied):
    path = save_checkpoint(tmp_path / "hf", kind="dense", tie_word_embeddings=tied)
    layouts = {"tp2_pp2": ParallelConfig(tensor=2, pipeline=2, sequence=True), "pp4": ParallelConfig(pipeline=4)}
    run_ranks(round_trip, 4, path, layouts, timeout_s=150)


@pytest.mark.full
def test_layers_without_experts_return_bit_for_bit(tmp_path):
    path = save_checkpoint(tmp_path / "hf", decoder_sparse_step=2, mlp_only_layers=[3])
    run_ranks(round_trip, 2, path, LAYOUTS_OF_2, timeout_s=120)


def full_size_coverage(rank, world_size, port, names):
    """(entries met, entries of the map, parameters) of each published model, built whole without memory."""
    parallel = ParallelConfig()
    init_parallel(
        parallel, rank=rank, world_size=world_size, master_addr="127.0.0.1", master_port=port,
        timeout_s=TIMEOUT_S, seed=0,
    )  # fmt: skip
    torch.cuda.current_device = lambda: torch.device("meta")
    results = []
    for name in names:
        hf_config = published_config(name)
        family = family_of(hf_config)
        model = family.megatron_config(hf_config)
        trainer = trainer_config(parallel, Precision.bf16)
        trainer.megatron["perform_initialization"] = False
        with torch.device("meta"):
            chunk = _gpt(parallel, model, transformer_config(trainer, model), 0)
        weight_map = family.weight_map(hf_config)
        held = local_weights([chunk], weight_map)
        wrong = [i for i, tensor in held if tuple(tensor.shape) != weight_map.entries[i].shard_shape(1)]
        assert not wrong, [weight_map.entries[i].megatron[0] for i in wrong]
        indices = sorted(index for index, _ in held)
        results.append((indices, len(weight_map.entries), sum(tensor.numel() for _, tensor in held)))
    dist.destroy_process_group()
    return results


def test_every_megatron_parameter_of_the_published_models_is_covered_exactly_once():
    names = ["Qwen3-8B", "Qwen3-30B-A3B", "Qwen3-235B-A22B"]
    (results,) = run_ranks(full_size_coverage, 1, names, timeout_s=150)
    for indices, num_entries, _ in results:
        assert indices == list(range(num_entries))
    assert [round(count / 1e9, 1) for _, _, count in results] == [8.2, 30.5, 235.1]


def logits_of_loaded_weights(rank, world_size, port, paths, tokens_T, bounds):
    """float32 [T, V] of each checkpoint, sequences packed one after the other."""
    parallel = ParallelConfig()
    init_parallel(
        parallel, rank=rank, world_size=world_size, master_addr="127.0.0.1", master_port=port,
        timeout_s=TIMEOUT_S, seed=0,
    )  # fmt: skip
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    longest = int(cu_seqlens.diff().max())
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )  # fmt: skip
    position_ids_T = torch.cat([torch.arange(int(length)) for length in cu_seqlens.diff()])
    results = []
    for path in paths:
        chunks, _, _ = loaded_chunks(path, parallel)
        chunks[0].eval()
        with torch.no_grad():
            logits_1TV = chunks[0](tokens_T[None], position_ids_T[None], None, packed_seq_params=packed)
        results.append(logits_1TV[0].numpy())
    dist.destroy_process_group()
    return results


def test_loaded_weights_give_the_logits_of_transformers(tmp_path):
    paths = [
        save_checkpoint(tmp_path / "moe"),
        save_checkpoint(tmp_path / "not_normalised", norm_topk_prob=False),
        save_checkpoint(tmp_path / "mixed", decoder_sparse_step=2, mlp_only_layers=[3]),
        save_checkpoint(tmp_path / "dense_tied", kind="dense", tie_word_embeddings=True),
    ]
    bounds = [0, 17, 40, 41]
    tokens_T = torch.randint(0, SHARED["vocab_size"], (bounds[-1],), generator=torch.Generator().manual_seed(5))
    (results,) = run_ranks(logits_of_loaded_weights, 1, paths, tokens_T, bounds, timeout_s=90)
    for path, logits_TV in zip(paths, results, strict=True):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        with torch.no_grad():
            expected = [model(tokens_T[None, a:b]).logits[0] for a, b in pairwise(bounds)]
        difference = (torch.from_numpy(logits_TV) - torch.cat(expected)).abs().max()
        assert difference < 1e-4, (path.name, difference)


def refusals_and_export(rank, world_size, port, path, broken, out):
    """One rank: an export, the refusal to overwrite it, and what a broken checkpoint is told."""
    parallel = ParallelConfig()
    init_parallel(
        parallel, rank=rank, world_size=world_size, master_addr="127.0.0.1", master_port=port,
        timeout_s=TIMEOUT_S, seed=0,
    )  # fmt: skip
    chunks, family, hf_config = loaded_chunks(path, parallel, Precision.bf16)
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
    assert unwrap(chunks[0]).vocab_size == SHARED["vocab_size"]
    dist.destroy_process_group()
    return messages


def test_an_export_is_a_checkpoint_that_transformers_loads_and_a_broken_one_is_refused_in_full(tmp_path):
    path = save_checkpoint(tmp_path / "hf")
    broken = tmp_path / "broken"
    broken.mkdir()
    tensors = load_file(path / "model.safetensors")
    missing = tensors.pop("model.layers.1.self_attn.k_norm.weight")
    tensors["model.layers.1.self_attn.k_bias"] = missing
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:100].clone()
    save_file(tensors, broken / "model.safetensors")
    out = tmp_path / "out" / "hf"

    (messages,) = run_ranks(refusals_and_export, 1, path, broken, out, timeout_s=90)

    assert "model.layers.1.self_attn.k_norm.weight: missing" in messages["broken"]
    assert "model.layers.1.self_attn.k_bias: not part of this model" in messages["broken"]
    assert "lm_head.weight: shape [100, 32], config.json implies [131, 32]" in messages["broken"]
    assert [file.name for file in out.parent.iterdir()] == ["hf"]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(out)
    original = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    assert index["metadata"]["total_size"] == 2 * sum(parameter.numel() for parameter in model.parameters())
    assert model.dtype == torch.bfloat16
    for name, tensor in original.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert (out / "tokenizer.json").read_text() == "{}"
