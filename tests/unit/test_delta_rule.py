"""The gated delta rule in torch against its recurrence, token by token in float64; packs against their sequences."""

from itertools import pairwise

import pytest
import torch

from megatron_patches.delta_rule import CHUNK, causal_conv1d, chunk_gated_delta_rule, l2norm

HEADS, KEY, VALUE = 3, 4, 5
BOUNDS = [0, 1, 1, 70, 75, 75 + 2 * CHUNK, 3 * CHUNK + 30]
"""Bounds of six sequences: one is empty, others are shorter than a chunk, as long as two, or in between."""


def inputs(length: int, seed: int = 1) -> list[torch.Tensor]:
    """Queries, keys, values, decays and steps of one row of tokens."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, length, HEADS, size, generator=generator) for size in (KEY, KEY, VALUE))
    g = -torch.nn.functional.softplus(2 * torch.randn(1, length, HEADS, generator=generator))
    beta = torch.randn(1, length, HEADS, generator=generator).sigmoid()
    return [x.requires_grad_() for x in (l2norm(q).detach(), l2norm(k).detach(), v, g, beta)]


def token_by_token(q, k, v, g, beta):
    """S_t = a_t (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T and o_t = S_t^T q_t / sqrt(K)."""
    q, k, v, g, beta = (x[0].double() for x in (q, k, v, g, beta))
    outputs = []
    for head in range(HEADS):
        state = torch.zeros(KEY, VALUE, dtype=torch.float64)
        for t in range(len(q)):
            key, step = k[t, head], beta[t, head]
            state = g[t, head].exp() * (state - step * torch.outer(key, key @ state)) + step * torch.outer(
                key, v[t, head]
            )
            outputs.append(state.T @ q[t, head] / KEY**0.5)
    return torch.stack(outputs).view(HEADS, len(q), VALUE).transpose(0, 1)[None]


def gradients(output, tensors):
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).to(output)
    return torch.autograd.grad((output * weights).sum(), tensors)


@pytest.mark.parametrize("length", [1, 5, CHUNK, CHUNK + 1, 3 * CHUNK - 2])
def test_chunks_give_the_recurrence_and_its_gradients(length):
    tensors = inputs(length)
    output, state = chunk_gated_delta_rule(*tensors, initial_state=None, output_final_state=False)
    expected = token_by_token(*tensors)
    assert state is None
    assert (output - expected).abs().max() < 1e-5
    for actual, wanted in zip(gradients(output, tensors), gradients(expected, tensors), strict=True):
        assert (actual - wanted).abs().max() < 1e-4


def test_the_state_begins_at_zero_with_each_packed_sequence():
    tensors = inputs(BOUNDS[-1])
    packed, _ = chunk_gated_delta_rule(*tensors, cu_seqlens=torch.tensor(BOUNDS, dtype=torch.int32))
    parts = [[x[:, a:b] for x in tensors] for a, b in pairwise(BOUNDS) if a < b]
    expected = torch.cat([token_by_token(*part) for part in parts], dim=1)
    assert (packed - expected).abs().max() < 1e-5
    for actual, wanted in zip(gradients(packed, tensors), gradients(expected, tensors), strict=True):
        assert (actual - wanted).abs().max() < 1e-4


def test_a_decay_that_forgets_everything_overflows_nowhere():
    """exp() of the difference of two decays in the wrong order would be infinite."""
    q, k, v, g, beta = inputs(CHUNK)
    strong = torch.full_like(g, -50.0).requires_grad_()
    output, _ = chunk_gated_delta_rule(q, k, v, strong, beta)
    assert all(gradient.isfinite().all() for gradient in gradients(output, [q, k, v, strong, beta]))
    alone = beta[..., None] * (q * k).sum(-1, keepdim=True) * v / KEY**0.5
    assert (output - alone).abs().max() < 1e-6


def test_a_convolution_sees_a_token_and_those_before_it_in_its_sequence():
    x, weight = torch.randn(1, 12, 3), torch.randn(3, 4)
    bounds = [0, 5, 12]
    expected = torch.zeros(12, 3)
    for start, end in pairwise(bounds):
        for t in range(start, end):
            for back in range(min(4, t - start + 1)):
                expected[t] += weight[:, 3 - back] * x[0, t - back]
    output, state = causal_conv1d(x, weight, activation="silu", cu_seqlens=torch.tensor(bounds))
    assert state is None
    assert (output[0] - torch.nn.functional.silu(expected)).abs().max() < 1e-5
    whole, _ = causal_conv1d(x[:, 5:], weight)
    assert torch.equal(whole, output[:, 5:])


def test_results_have_the_dtype_of_the_queries_and_are_computed_in_float32():
    tensors = inputs(20)
    rounded = [x.detach().bfloat16() for x in tensors[:3]]
    output, _ = chunk_gated_delta_rule(*rounded, *tensors[3:])
    exact, _ = chunk_gated_delta_rule(*(x.float() for x in rounded), *tensors[3:])
    assert output.dtype is torch.bfloat16
    assert torch.equal(output, exact.bfloat16())
