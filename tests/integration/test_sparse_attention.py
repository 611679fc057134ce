"""Indexers of sparse attention: frozen unless a loss of their own trains them, whose gradient is that of autograd."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from small_models import VOCAB, small_model
from trainer_cases import trainer_config
from transformers import AutoModelForCausalLM
from weight_cases import change_layout, join

from slimrl.algorithms.objective import cross_entropy
from slimrl.config.schema.trainer import OptimizerConfig, ParallelConfig
from slimrl.data.packing import pack
from slimrl.data.trajectory import Segment
from slimrl.models.family import family_of
from slimrl.models.hf_config import read_hf_config
from slimrl.trainer.build import build_model, unwrap
from slimrl.trainer.micro_batch_runner import MicroBatchRunner
from slimrl.trainer.optimizer import Optimizer
from slimrl.trainer.weights import load_hf_weights

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

COEFFICIENT = 0.3
LENGTHS = (33, 9, 17)
"""The last token of a sequence is no input; the others fill whole blocks of 8, so that there is no padding."""
NAMES = {
    "linear_wq_b.weight": "wq_b.weight",
    "linear_wk.weight": "wk.weight",
    "k_norm.weight": "k_norm.weight",
    "k_norm.bias": "k_norm.bias",
    "linear_weights_proj.weight": "weights_proj.weight",
}
"""Weights of an indexer: Megatron's name -> transformers'."""


def tokens_of(length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(0, VOCAB, length)


def indexer_gradients(rank, num_ranks, port, path, layouts, coefficient):
    """By layout: the tokens of an update, and the gradients that it gives each indexer's weights by name."""
    join(rank, num_ranks, port)
    hf_config, results = read_hf_config(path), []
    segments = [Segment.not_sampled(tokens_of(length), np.ones(length, bool)) for length in LENGTHS]
    for parallel in layouts:
        layout = change_layout(parallel)
        megatron = {"dsa_indexer_loss_coeff": coefficient}
        trainer = replace(
            trainer_config(num_ranks, megatron=megatron),
            parallel=parallel,
            optimizer=OptimizerConfig(lr=1e-3, clip_grad=0, distributed=False),
        )
        chunks = build_model(trainer, family_of(hf_config).megatron_config(hf_config))
        load_hf_weights(chunks, path, family_of(hf_config), hf_config)
        runner = MicroBatchRunner(chunks, Optimizer(trainer, chunks, 1), layout, vocab_size=VOCAB, chunk_tokens=16)
        (batches,) = pack(
            [[one] for one in segments], np.ones(len(LENGTHS), np.float32), budget_tokens=64, alignment=8,
            data_parallel=1,
        )  # fmt: skip
        result = runner.train_update(batches, cross_entropy, denominator=1.0, temperature=1.0)
        found = {
            name: None if not one.requires_grad else one.main_grad.numpy().copy()
            for name, one in unwrap(chunks[0]).named_parameters()
            if ".indexer." in name
        }
        results.append((result.num_tokens, found))
    dist.destroy_process_group()
    return results


def index_scores(indexer, hidden_1TH, latent_1TQ, rotary, rotate):
    """float [T, T]: what each token's indexer gives each token, differentiable (transformers chooses without)."""
    length = hidden_1TH.shape[1]
    query = indexer.wq_b(latent_1TQ).view(1, length, indexer.n_heads, indexer.head_dim)
    key = indexer.k_norm(indexer.wk(hidden_1TH)).unsqueeze(2)
    rotated = indexer.qk_rope_head_dim
    query_rotated, key_rotated = rotate(query[..., :rotated], key[..., :rotated], *rotary, unsqueeze_dim=2)
    query = torch.cat([query_rotated, query[..., rotated:]], -1)[0]
    key = torch.cat([key_rotated, key[..., rotated:]], -1)[0, :, 0]
    products = (torch.einsum("qhd,kd->qhk", query, key) * indexer.softmax_scale).relu()
    weights_TH = indexer.weights_proj(hidden_1TH)[0] * indexer.n_heads**-0.5
    return torch.einsum("qh,qhk->qk", weights_TH, products)


def expected_loss(model, tokens):
    """Sum over layers and tokens of the divergence of an indexer's distribution from that of all attention heads
    (arXiv:2512.02556, equation 3), over all earlier tokens."""
    from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import apply_rotary_pos_emb_interleave as rotate

    total, seen = 0.0, []
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(
            lambda attention, args, kwargs, output: seen.append((attention, kwargs, output[1])), with_kwargs=True
        )
    with torch.no_grad():
        model(torch.from_numpy(tokens)[None])
    causal = torch.ones(len(tokens), len(tokens)).tril().bool()
    for attention, kwargs, _ in seen:
        hidden_1TH, rotary = kwargs["hidden_states"], kwargs["position_embeddings"]
        with torch.no_grad():
            latent = attention.q_a_layernorm(attention.q_a_proj(hidden_1TH))
            target = dense_attention(attention, hidden_1TH, latent, rotary, rotate, causal)
        scores = index_scores(attention.indexer, hidden_1TH, latent, rotary, rotate).masked_fill(~causal, -torch.inf)
        log_probs = scores.log_softmax(-1).masked_fill(~causal, 0.0)
        total = total + (target * (target.clamp_min(1e-10).log() - log_probs)).sum()
    for layer in model.model.layers:
        layer.self_attn._forward_hooks.clear()
    return total


def dense_attention(attention, hidden_1TH, latent_1TQ, rotary, rotate, causal_TT):
    """float [T, T]: mean over heads of the attention to all earlier tokens, whatever an indexer chooses."""
    length, nope, rope = hidden_1TH.shape[1], attention.qk_nope_head_dim, attention.qk_rope_head_dim
    query = attention.q_b_proj(latent_1TQ).view(1, length, -1, nope + rope).transpose(1, 2)
    down = attention.kv_a_proj_with_mqa(hidden_1TH)
    key_rotated = down[..., attention.kv_lora_rank :][:, None]
    up = attention.kv_b_proj(attention.kv_a_layernorm(down[..., : attention.kv_lora_rank]))
    key_nope = up.view(1, length, -1, nope + attention.v_head_dim).transpose(1, 2)[..., :nope]
    query_rotated, key_rotated = rotate(query[..., nope:], key_rotated, *rotary)
    scores = query[..., :nope] @ key_nope.transpose(-1, -2) + query_rotated @ key_rotated.transpose(-1, -2)
    return (scores * attention.scaling).masked_fill(~causal_TT, -torch.inf).softmax(-1)[0].mean(0)


def test_the_loss_of_indexers_has_the_gradient_of_autograd_under_every_layout(tmp_path):
    path = small_model("glm_moe_dsa", tmp_path / "hf", num_hidden_layers=2)
    one_rank = [ParallelConfig()]
    ((num_tokens, found),) = run_ranks(indexer_gradients, 1, path, one_rank, COEFFICIENT, timeout_s=120)[0]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    (COEFFICIENT / num_tokens * sum(expected_loss(model, tokens_of(length)[:-1]) for length in LENGTHS)).backward()
    assert len(found) == 2 * len(NAMES)
    for name, gradient in found.items():
        layer, part = name.split(".")[2], name.split(".indexer.")[1]
        expected = model.model.layers[int(layer)].self_attn.indexer.get_parameter(NAMES[part]).grad
        assert (torch.from_numpy(gradient) - expected).norm() <= 1e-4 * expected.norm(), name
    layouts = [ParallelConfig(tensor=2, sequence=True, expert=2), ParallelConfig(context=2), ParallelConfig(expert=2)]
    for ranks in run_ranks(indexer_gradients, 2, path, layouts, COEFFICIENT, timeout_s=120):
        for _, gradients in ranks:
            for name, gradient in gradients.items():
                assert np.linalg.norm(gradient - found[name]) <= 1e-4 * np.linalg.norm(found[name]), name


def test_indexers_are_frozen_without_a_loss(tmp_path):
    path = small_model("glm_moe_dsa_shared", tmp_path / "hf")
    ((_, found),) = run_ranks(indexer_gradients, 1, path, [ParallelConfig()], 0.0, timeout_s=120)[0]
    assert len(found) == 2 * len(NAMES)
    assert set(found.values()) == {None}
