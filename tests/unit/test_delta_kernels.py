"""What stands in for SGLang's kernels of gated delta nets, against their recurrences step by step in float64."""

import sys
from itertools import accumulate, pairwise
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import silu
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, Qwen3_5RMSNormGated

from slimrl.engines.plugin.cpu import gates, sgl_kernel_stub
from slimrl.engines.plugin.cpu.delta_rule import CHUNK, chunk_gated_delta_rule, gating, sigmoid_gating_delta_rule_update
from slimrl.engines.plugin.cpu.short_convolution import causal_conv1d_fn, causal_conv1d_update

KEY_HEADS, HEADS, KEY, VALUE = 2, 6, 4, 5
SLOTS = 9
LENGTHS = [3, CHUNK + 1, 1, 2 * CHUNK, CHUNK - 1, 2 * CHUNK + 30]
"""Tokens of the sequences of a prefill: less than a chunk, several, and in between; the longest is neither first nor
alone in its last chunk."""
INDICES = torch.tensor([7, 2, 8, 0, 5, 3], dtype=torch.int32)


def bounds_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def projections(tokens: int, seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "q": random(1, tokens, KEY_HEADS, KEY), "k": random(1, tokens, KEY_HEADS, KEY),
        "v": random(1, tokens, HEADS, VALUE), "a": 2 * random(tokens, HEADS), "b": random(tokens, HEADS),
    }  # fmt: skip


A_LOG, DT_BIAS = torch.tensor([-1.0, 0.0, 0.5, 1.0, -0.5, 0.2]), torch.linspace(-1, 1, HEADS)


def pool() -> torch.Tensor:
    return torch.randn(SLOTS, HEADS, VALUE, KEY, generator=torch.Generator().manual_seed(2))


def token_by_token(given, bounds, states, indices):
    """Outputs [1, T, H, V] and states, in float64: S = a S (I - b k k^T) + b v k^T and o = S q / sqrt(K)."""
    q, k, v, a, b = (given[name].double().squeeze(0) for name in "qkvab")
    states, output = states.double().clone(), torch.zeros(v.shape, dtype=torch.float64)
    for slot, (start, end) in zip(indices.tolist(), pairwise(bounds.tolist()), strict=True):
        for head in range(HEADS):
            key_head = head // (HEADS // KEY_HEADS)
            for t in range(start, end):
                query, key = (x[t, key_head] / (x[t, key_head].square().sum() + 1e-6).sqrt() for x in (q, k))
                rate = A_LOG[head].double().exp() * (a[t, head] + DT_BIAS[head]).exp().log1p()
                step = b[t, head].sigmoid()
                erased = states[slot, head] @ (torch.eye(KEY, dtype=torch.float64) - step * torch.outer(key, key))
                states[slot, head] = (-rate).exp() * erased + step * torch.outer(v[t, head], key)
                output[t, head] = states[slot, head] @ query / KEY**0.5
    return output[None], states


def prefill(given, bounds, states, indices):
    g, beta = gating(A_LOG, given["a"], given["b"], DT_BIAS)
    output, *unused = chunk_gated_delta_rule(
        **{name: given[name] for name in "qkv"}, g=g, beta=beta, initial_state=states, initial_state_indices=indices,
        cu_seqlens=bounds, head_first=False, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    assert unused == [None, None]
    return output


def decode(given, states, indices):
    return sigmoid_gating_delta_rule_update(
        A_log=A_LOG, dt_bias=DT_BIAS, **given, initial_state_source=states, initial_state_indices=indices,
        cu_seqlens=torch.arange(len(indices) + 1, dtype=torch.int32), use_qk_l2norm_in_kernel=True, softplus_beta=1.0,
        softplus_threshold=20.0,
    )  # fmt: skip


def part(given, start: int, end: int) -> dict[str, torch.Tensor]:
    return {name: x[:, start:end] if name in "qkv" else x[start:end] for name, x in given.items()}


def test_sequences_continue_from_their_states_and_leave_the_others_alone():
    given, states = projections(sum(LENGTHS)), pool()
    expected, behind = token_by_token(given, bounds_of(LENGTHS), states, INDICES)
    untouched = [slot for slot in range(SLOTS) if slot not in INDICES]
    before = states[untouched].clone()
    output = prefill(given, bounds_of(LENGTHS), states, INDICES)
    assert output.dtype is torch.float32
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(states.double(), behind, atol=1e-5, rtol=0)
    assert torch.equal(states[untouched], before)


def test_pieces_of_a_prefill_and_decode_steps_give_what_the_recurrence_gives_at_once():
    """Two sequences: prefilled in two pieces that end within a chunk, then decoded."""
    lengths, indices, states = [CHUNK + 20, 40], torch.tensor([4, 1], dtype=torch.int32), pool()
    given = [projections(length, seed) for seed, length in enumerate(lengths)]
    start = states.clone()

    def both(start_of, end_of) -> dict[str, torch.Tensor]:
        pieces = [part(x, start, end) for x, start, end in zip(given, start_of, end_of, strict=True)]
        return {name: torch.cat([piece[name] for piece in pieces], dim=int(name in "qkv")) for name in given[0]}

    outputs: list[list[torch.Tensor]] = [[], []]
    cuts = [[0, 0], [30, 11], [lengths[0] - 3, lengths[1] - 3]]
    for first, last in pairwise(cuts):
        sizes = [b - a for a, b in zip(first, last, strict=True)]
        found = prefill(both(first, last), bounds_of(sizes), states, indices)[0].split(sizes)
        outputs = [[*old, new] for old, new in zip(outputs, found, strict=True)]
    for back in (3, 2, 1):
        first = [length - back for length in lengths]
        found = decode(both(first, [x + 1 for x in first]), states, indices)
        assert found.shape == (1, 2, HEADS, VALUE)
        outputs = [[*old, new] for old, new in zip(outputs, found[0].split(1), strict=True)]
    whole = both([0, 0], lengths)
    expected, behind = token_by_token(whole, bounds_of(lengths), start, indices)
    torch.testing.assert_close(torch.cat([torch.cat(x) for x in outputs])[None].double(), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(states.double(), behind, atol=1e-5, rtol=0)


def test_a_decay_that_forgets_everything_overflows_nowhere():
    """exp() of the difference of two decays in the wrong order would be infinite."""
    given, states = projections(CHUNK), pool()
    given["a"] = torch.full_like(given["a"], 60.0)
    expected, _ = token_by_token(given, bounds_of([CHUNK]), states, INDICES[:1])
    output = prefill(given, bounds_of([CHUNK]), states, INDICES[:1])
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=0)
    assert states.isfinite().all()


def test_results_have_the_dtype_of_the_queries_and_states_that_of_the_pool():
    given, states = projections(20), pool()
    rounded = {name: x.bfloat16() for name, x in given.items()}
    wide = states.clone()
    output = prefill(rounded, bounds_of([20]), states, INDICES[:1])
    exact = prefill({name: x.float() for name, x in rounded.items()}, bounds_of([20]), wide, INDICES[:1])
    assert output.dtype is torch.bfloat16
    assert torch.equal(output, exact.bfloat16())
    assert torch.equal(states, wide)
    narrow = pool().bfloat16()
    prefill(given, bounds_of([20]), narrow, INDICES[:1])
    assert narrow.dtype is torch.bfloat16


CHANNELS, TAPS = 3, 4


def convolved(sequence_TC, weight_CW, bias_C):
    """The convolution of a whole sequence with nothing before it, one product at a time in float64."""
    sums = torch.zeros(len(sequence_TC), CHANNELS, dtype=torch.float64)
    for t in range(len(sequence_TC)):
        for back in range(min(TAPS, t + 1)):
            sums[t] += weight_CW[:, TAPS - 1 - back].double() * sequence_TC[t - back].double()
    return silu(sums if bias_C is None else sums + bias_C.double())


@pytest.mark.parametrize("biased", [False, True])
def test_a_convolution_goes_on_from_the_last_inputs_of_its_sequence(biased):
    """Prefilled in pieces, some shorter than the filter, then decoded; slots hold the rubbish of others at first."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(CHANNELS, TAPS, generator=generator)
    bias = torch.randn(CHANNELS, generator=generator) if biased else None
    sequences = [torch.randn(length, CHANNELS, generator=generator) for length in (12, 6, 9)]
    slots = torch.tensor([5, 0, 3], dtype=torch.int32)
    states = torch.full((7, CHANNELS, TAPS - 1), 50.0)
    cuts = [[0, 0, 0], [5, 1, 2], [6, 3, 8]]
    found: list[list[torch.Tensor]] = [[], [], []]
    for round_, (first, last) in enumerate(pairwise(cuts)):
        pieces = [x[a:b] for x, a, b in zip(sequences, first, last, strict=True)]
        sizes = [len(piece) for piece in pieces]
        output = causal_conv1d_fn(
            torch.cat(pieces).T, weight, bias, activation="silu", conv_states=states,
            has_initial_state=torch.tensor([bool(round_)] * 3), cache_indices=slots, query_start_loc=bounds_of(sizes),
            seq_lens_cpu=sizes,
        )  # fmt: skip
        assert output.shape == (CHANNELS, sum(sizes))
        found = [[*old, new] for old, new in zip(found, output.T.split(sizes), strict=True)]
    # The second sequence decodes alone, and then with the first one.
    for members in ([1], [1, 0], [0]):
        tokens = torch.stack([sequences[i][sum(map(len, found[i]))] for i in members])
        output = causal_conv1d_update(tokens, states, weight, bias, "silu", conv_state_indices=slots[members])
        for i, row in zip(members, output, strict=True):
            found[i].append(row[None])
    for parts, sequence in zip(found, sequences, strict=True):
        output = torch.cat(parts).double()
        torch.testing.assert_close(output, convolved(sequence, weight, bias)[: len(output)], atol=1e-5, rtol=0)
    assert [sum(map(len, parts)) for parts in found] == [8, 5, 8]
    for slot in (1, 2, 4, 6):
        assert (states[slot] == 50.0).all()


def test_a_state_in_another_dtype_is_rounded_and_nothing_else():
    inputs, weight = torch.randn(1, CHANNELS), torch.ones(CHANNELS, TAPS)
    states = torch.zeros(1, CHANNELS, TAPS - 1, dtype=torch.bfloat16)
    output = causal_conv1d_update(inputs, states, weight, None, "silu", conv_state_indices=torch.tensor([0]))
    assert output.dtype is torch.float32
    assert torch.equal(states[0, :, -1], inputs[0].bfloat16())
    torch.testing.assert_close(output, silu(inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_compute_in_float32(dtype):
    x, gate = torch.randn(7, 12, dtype=dtype), torch.randn(7, 12, dtype=dtype)
    weight = 1 + torch.randn(12, dtype=dtype)
    found = gates.rms_norm_gated(x, gate, weight, None, "silu", residual=None, eps=1e-3, prenorm=False)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double() * silu(gate.double())
    assert found.dtype is dtype
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=2e-6 if dtype is torch.float32 else 4e-3)

    shared, routed = torch.randn(7, 12, dtype=dtype), torch.randn(7, 12, dtype=dtype)
    expected = routed.double() + (x.double() @ weight.double()).sigmoid()[:, None] * shared.double()
    assert gates.fused_gate_sigmoid_mul_add(x, weight, shared, routed) is None
    assert routed.dtype is dtype
    torch.testing.assert_close(routed.double(), expected, atol=1e-5 if dtype is torch.float32 else 3e-2, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_and_gates_of_qwen3_5_are_those_of_transformers(dtype):
    """Rows of [each query head, its gate], as transformers' Qwen3_5Attention takes them apart."""
    tokens, heads, kv_heads, dim = 5, 4, 2, 6
    query_gate, key = (
        torch.randn(tokens, heads * 2 * dim, dtype=dtype),
        torch.randn(tokens, kv_heads * dim, dtype=dtype),
    )
    norms = [Qwen3_5RMSNorm(dim, eps=1e-3).to(dtype) for _ in range(2)]
    for norm in norms:
        torch.nn.init.normal_(norm.weight)
    weights = [norm.weight.data for norm in norms]
    found = gates.fused_qk_gemma_rmsnorm_with_gate(query_gate, key, *weights, 1e-3, dim, heads)
    query, gate = query_gate.view(tokens, heads, 2 * dim).chunk(2, dim=-1)
    expected = (norms[0](query).flatten(0, 1), norms[1](key.view(-1, dim)), gate.flatten(0, 1))
    for given, wanted in zip(found, expected, strict=True):
        assert given.is_contiguous()
        torch.testing.assert_close(given, wanted, atol=1e-6, rtol=1e-6 if dtype is torch.float32 else 8e-3)

    attended, flat = torch.randn(tokens, heads * dim, dtype=dtype), gate.flatten(1)
    expected = attended.double() * flat.double().sigmoid()
    assert gates.fused_sigmoid_mul(attended, flat) is None
    torch.testing.assert_close(attended.double(), expected, atol=1e-6, rtol=1e-6 if dtype is torch.float32 else 8e-3)

    norm = SimpleNamespace(
        norm_before_gate=True, group_size=None, activation="swish", eps=1e-3, weight=1 + torch.randn(dim)
    )
    x, z = torch.randn(2, 7, dim, dtype=dtype)
    theirs = Qwen3_5RMSNormGated(dim, eps=1e-3)
    theirs.weight.data = norm.weight
    found = gates.gated_norm(norm, x, z)
    assert found.dtype is dtype
    torch.testing.assert_close(found, theirs(x, z).to(dtype), atol=1e-6, rtol=1e-6 if dtype is torch.float32 else 8e-3)
    with pytest.raises(AssertionError):
        gates.gated_norm(SimpleNamespace(**{**vars(norm), "activation": "sigmoid"}), x, z)


def test_the_input_of_a_delta_net_of_qwen3_5_has_its_parts_one_after_the_other():
    q, k, v, z, b, a = (torch.randn(3, width) for width in (2 * KEY, 2 * KEY, 6 * VALUE, 6 * VALUE, 6, 6))
    found = gates.fused_qkvzba_split_reshape_cat_contiguous(
        torch.cat([q, k, v, z], dim=-1), torch.cat([b, a], dim=-1), KEY_HEADS, HEADS, KEY, VALUE
    )
    expected = (torch.cat([q, k, v], dim=-1), z.view(3, HEADS, VALUE), b, a)
    assert all(x.is_contiguous() and torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_sglang_finds_them_by_the_names_of_the_kernels(monkeypatch):
    monkeypatch.setattr(sys, "modules", {k: v for k, v in sys.modules.items() if k.partition(".")[0] != "sgl_kernel"})
    assert sgl_kernel_stub.install()
    from sgl_kernel.mamba import causal_conv1d_fn_cpu, causal_conv1d_update_cpu, chunk_gated_delta_rule_cpu

    ops = torch.ops.sgl_kernel
    assert (causal_conv1d_fn_cpu, causal_conv1d_update_cpu) == (causal_conv1d_fn, causal_conv1d_update)
    assert (chunk_gated_delta_rule_cpu, ops.fused_gdn_gating_cpu) == (chunk_gated_delta_rule, gating)
    assert ops.fused_sigmoid_gating_delta_rule_update_cpu is sigmoid_gating_delta_rule_update
    assert ops.fused_sigmoid_mul_cpu is gates.fused_sigmoid_mul
    assert ops.fused_qk_gemma_rmsnorm_with_gate_cpu is gates.fused_qk_gemma_rmsnorm_with_gate
    assert ops.fused_qkvzba_split_reshape_cat_contiguous_cpu is gates.fused_qkvzba_split_reshape_cat_contiguous
    # By the absence of this one SGLang knows that there are no kernels for AMX.
    assert not hasattr(ops, "convert_weight_packed")
