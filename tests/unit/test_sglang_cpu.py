"""The CPU engine's replacements against plain loops in float64, and the bookkeeping of its dense decode cache."""

import random
from types import SimpleNamespace

import pytest
import torch

from slimrl.engines.plugin.cpu import batched_attention, batched_experts
from slimrl.engines.plugin.cpu.batched_attention import paged_attention
from slimrl.engines.plugin.cpu.batched_experts import around_forward, experts_forward
from slimrl.engines.plugin.cpu.decode_cache import DecodeCache
from slimrl.engines.plugin.cpu.row_table import RowTable
from slimrl.engines.plugin.cpu.seeded_sampling import sample, uniforms

HEADS, KV_HEADS, SIZE, SLOTS = 4, 2, 8, 600


def attention_reference(query_HD, keys_LGD, values_LGD, window=None, scale=None, sinks=None):
    """One query that sees all the keys; float64 [H, D]."""
    repeats = query_HD.shape[0] // keys_LGD.shape[1]
    keys = keys_LGD.double().repeat_interleave(repeats, 1)
    values = values_LGD.double().repeat_interleave(repeats, 1)
    scores_HL = torch.einsum("hd,lhd->hl", query_HD.double(), keys) * (
        query_HD.shape[-1] ** -0.5 if scale is None else scale
    )
    if window is not None:
        scores_HL[:, : max(0, len(keys) - 1 - window)] = -torch.inf
    if sinks is not None:
        scores_HL = torch.cat([scores_HL, sinks.double()[:, None]], dim=-1)
    return torch.einsum("hl,lhd->hd", scores_HL.softmax(-1)[:, : len(keys)], values)


class Pool:
    """Requests whose tokens lie at random slots, as in an engine."""

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        self.keys = torch.randn(SLOTS, KV_HEADS, SIZE)
        self.values = torch.randn(SLOTS, KV_HEADS, SIZE)
        self.table = torch.zeros(16, 128, dtype=torch.int32)
        self.free = torch.randperm(SLOTS).tolist()

    def grow(self, request, start, end):
        slots = [self.free.pop() for _ in range(end - start)]
        self.table[request, start:end] = torch.tensor(slots, dtype=torch.int32)
        self.keys[slots], self.values[slots] = torch.randn(2, end - start, KV_HEADS, SIZE)

    def release(self, request, length):
        slots = self.table[request, :length].tolist()
        self.free = slots + self.free
        self.keys[slots], self.values[slots] = torch.nan, torch.nan

    def context(self, request, length):
        slots = self.table[request, :length].long()
        return self.keys[slots], self.values[slots]


@pytest.mark.parametrize("sinks", [None, torch.linspace(-2.0, 3.0, HEADS)])
@pytest.mark.parametrize("window", [None, 5])
def test_prefill_equals_one_query_at_a_time(window, sinks):
    pool = Pool()
    prefix, new = [0, 0, 7, 30, 1, 0], [1, 33, 20, 1, 3, 40]
    requests = torch.tensor([3, 0, 5, 1, 9, 2])
    for request, a, b in zip(requests.tolist(), prefix, new, strict=True):
        pool.grow(request, 0, a + b)
    query = torch.randn(sum(new), HEADS, SIZE)
    output = torch.full_like(query, torch.nan)
    paged_attention(
        query, output, pool.keys, pool.values, pool.table, requests, prefix, new, scale=None, window=window, sinks=sinks
    )
    row = 0
    for request, a, b in zip(requests.tolist(), prefix, new, strict=True):
        for position in range(a, a + b):
            expected = attention_reference(query[row], *pool.context(request, position + 1), window, sinks=sinks)
            torch.testing.assert_close(output[row].double(), expected, atol=2e-6, rtol=0)
            row += 1


@pytest.mark.parametrize("window", [None, 5])
def test_decode_equals_a_loop_while_requests_come_and_go_and_leave_nan_behind(window):
    pool, cache, rng = Pool(), DecodeCache(max_tokens=16 * 128), random.Random(0)
    lengths = {}
    for step in range(60):
        for request in [request for request in lengths if rng.random() < 0.08]:
            pool.release(request, lengths.pop(request))
        fresh = [request for request in range(16) if request not in lengths and rng.random() < 0.2]
        for request in fresh:
            lengths[request] = rng.randint(1, 12)
            pool.grow(request, 0, lengths[request])
        if fresh:
            cache.forget(fresh)
        batch = rng.sample(sorted(lengths), len(lengths))
        if not batch:
            continue
        for request in batch:
            pool.grow(request, lengths[request], lengths[request] + 1)
            lengths[request] += 1
        cache.begin_step(pool.table, torch.tensor(batch), torch.tensor([lengths[r] for r in batch]))
        query = torch.randn(len(batch), HEADS, SIZE)
        output = cache.attend(query, pool.keys, pool.values, None, window)
        for row, request in enumerate(batch):
            expected = attention_reference(query[row], *pool.context(request, lengths[request]), window)
            torch.testing.assert_close(output[row].double(), expected, atol=2e-6, rtol=0, msg=f"step {step}")


@pytest.mark.parametrize("most_scores", [1, 300, 1 << 24])
@pytest.mark.parametrize("window", [None, 3])
def test_attention_has_the_models_scale_however_little_is_held_at_once(monkeypatch, most_scores, window):
    monkeypatch.setattr(batched_attention, "_MAX_SCORES", most_scores)
    pool = Pool()
    prefix, new = [0, 0, 6, 5], [9, 12, 10, 8]
    requests = torch.tensor([3, 0, 5, 1])
    for request, a, b in zip(requests.tolist(), prefix, new, strict=True):
        pool.grow(request, 0, a + b)
    query = torch.randn(sum(new), HEADS, SIZE)
    output = torch.full_like(query, torch.nan)
    found = paged_attention(
        query, output, pool.keys, pool.values, pool.table, requests, prefix, new, scale=0.9, window=window
    )
    assert found is output
    row = 0
    for request, a, b in zip(requests.tolist(), prefix, new, strict=True):
        for position in range(a, a + b):
            expected = attention_reference(query[row], *pool.context(request, position + 1), window, 0.9)
            torch.testing.assert_close(output[row].double(), expected, atol=2e-6, rtol=0)
            row += 1


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 2e-6), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("value_size", [SIZE, SIZE - 3])
def test_decode_has_the_models_scale_and_takes_either_precision(dtype, atol, window, value_size):
    pool, cache = Pool(), DecodeCache(max_tokens=16 * 64)
    pool.keys, pool.values = pool.keys.to(dtype), pool.values[..., :value_size].to(dtype)
    lengths = [9, 4, 7]
    for request, length in enumerate(lengths):
        slots = [pool.free.pop() for _ in range(length)]
        pool.table[request, :length] = torch.tensor(slots, dtype=torch.int32)
    batch = torch.tensor([2, 0, 1])
    cache.begin_step(pool.table, batch, torch.tensor(lengths)[batch])
    query = torch.randn(3, HEADS, SIZE).to(dtype)
    output = cache.attend(query, pool.keys, pool.values, 0.9, window)
    assert output.shape == (3, HEADS, value_size)
    for row, request in enumerate(batch.tolist()):
        expected = attention_reference(query[row], *pool.context(request, lengths[request]), window, 0.9)
        torch.testing.assert_close(output[row].double(), expected, atol=atol, rtol=0)


def test_layers_have_copies_of_their_own_which_grow_and_are_given_up_when_they_would_grow_too_large():
    pool, cache = Pool(), DecodeCache(max_tokens=16 * 128)
    other = torch.randn(SLOTS, KV_HEADS, SIZE)
    for request, start, end in ((0, 0, 63), (1, 0, 40)):
        pool.grow(request, start, end)
    for length in (64, 65, 66):
        pool.grow(0, length - 1, length)
        pool.grow(1, length - 24, length - 23)
        lengths = torch.tensor([length, length - 23])
        cache.begin_step(pool.table, torch.tensor([0, 1]), lengths)
        for keys in (pool.keys, other):
            query = torch.randn(2, HEADS, SIZE)
            output = cache.attend(query, keys, pool.values, None, None)
            for row, tokens in enumerate(lengths.tolist()):
                slots = pool.table[row, :tokens].long()
                expected = attention_reference(query[row], keys[slots], pool.values[slots])
                torch.testing.assert_close(output[row].double(), expected, atol=2e-6, rtol=0)
    # 16 rows of 128 tokens are the limit, and so are the 32 of 64 that 17 requests need: the copies begin afresh.
    cache.begin_step(torch.zeros(40, 128, dtype=torch.int64), torch.arange(17), torch.full((17,), 5))
    assert cache.ready
    assert cache._layers == {}


def test_a_batch_larger_than_the_dense_cache_is_not_taken_and_a_later_one_is():
    pool, cache = Pool(), DecodeCache(max_tokens=16 * 64)
    pool.grow(0, 0, 100)
    cache.begin_step(pool.table, torch.tensor([0]), torch.tensor([100]))
    assert not cache.ready
    cache.begin_step(pool.table, torch.tensor([0]), torch.tensor([50]))
    assert cache.ready
    query = torch.randn(1, HEADS, SIZE)
    expected = attention_reference(query[0], *pool.context(0, 50))
    torch.testing.assert_close(cache.attend(query, pool.keys, pool.values, None, None)[0].double(), expected)


def test_rows_in_use_are_always_the_first_ones():
    table, rng = RowTable(), random.Random(1)
    lengths = {}
    for _ in range(200):
        lengths = {request: length + 1 for request, length in lengths.items() if rng.random() < 0.8}
        for request in range(20):
            if request not in lengths and rng.random() < 0.1:
                lengths[request] = rng.randint(2, 9)
                table.forget([request])
        batch = rng.sample(sorted(lengths), len(lengths))
        plan = table.plan(batch, [lengths[request] for request in batch])
        assert sorted(plan.rows) == list(range(len(batch)))
        sources, targets = {a for a, _ in plan.moves}, {b for _, b in plan.moves}
        assert not sources & targets
        assert all(row >= len(batch) for row in sources)


def test_a_request_that_skipped_a_step_is_filled_anew():
    table = RowTable()
    table.plan([4, 5], [10, 20])
    assert table.plan([4, 5], [12, 21]).fresh == [0]


def layer_of(experts, hidden, inner):
    return SimpleNamespace(
        num_experts=experts,
        w13_weight=torch.randn(experts, 2 * inner, hidden),
        w2_weight=torch.randn(experts, hidden, inner),
    )


def experts_reference(layer, hidden_TH, weights_TK, experts_TK):
    rows = []
    for hidden, weights, experts in zip(hidden_TH.double(), weights_TK, experts_TK.tolist(), strict=True):
        outputs = []
        for expert in experts:
            gate, up = (layer.w13_weight[expert].double() @ hidden).chunk(2)
            outputs.append(layer.w2_weight[expert].double() @ (gate * gate.sigmoid() * up))
        rows.append(sum(w * out for w, out in zip(weights.double(), outputs, strict=True)))
    return torch.stack(rows)


@pytest.mark.parametrize("tokens", [4, 31])
def test_batched_experts_equal_a_loop_in_float64(tokens):
    torch.manual_seed(0)
    layer, hidden_TH = layer_of(8, 16, 12), torch.randn(tokens, 16)
    weights_TK, experts_TK = torch.randn(tokens, 8).softmax(-1).topk(2)
    loads = torch.bincount(experts_TK.flatten(), minlength=8)
    output = experts_forward(
        hidden_TH, weights_TK, experts_TK, layer.w13_weight, layer.w2_weight, loads, int(loads.max())
    )
    expected = experts_reference(layer, hidden_TH, weights_TK, experts_TK)
    torch.testing.assert_close(output.double(), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("tokens", "changes"),
    [(20, {"gemm1_alpha": 1.7}), (20, {"activation": "gelu"}), (20, {"apply_router_weight_on_input": True}), (2, {})],
)
def test_what_batched_experts_do_not_know_or_gain_from_goes_to_the_original(tokens, changes):
    config = SimpleNamespace(
        **{"activation": "silu", "gemm1_alpha": None, "apply_router_weight_on_input": False} | changes
    )
    topk = (torch.ones(tokens, 2), torch.arange(2 * tokens).view(tokens, 2) % 8, None)
    assert (
        around_forward(lambda *args: "original", layer_of(8, 4, 4), torch.randn(tokens, 4), topk, config) == "original"
    )


@pytest.mark.parametrize(
    ("loads", "way"),
    [
        # Pairs of eight experts: fewer than eight pairs, or more than four times as many when padded, gain nothing.
        ([1] * 7, "original"),
        ([1] * 8, "batched"),
        ([4] + [1] * 4, "batched"),
        ([5] + [1] * 4, "original"),
        ([128] * 8, "batched"),
        ([129] + [128] * 7, "original"),
    ],
)
def test_experts_are_batched_where_padding_costs_little(monkeypatch, loads, way):
    monkeypatch.setattr(batched_experts, "experts_forward", lambda *given: "batched")
    layer = layer_of(8, 4, 4)
    experts = torch.cat([torch.full((load,), expert) for expert, load in enumerate(loads)])[:, None]
    topk = (torch.ones(experts.shape), experts, None)
    hidden = torch.randn(len(experts), 4)
    assert around_forward(lambda *given: "original", layer, hidden, topk, PLAIN) == way
    for bias in ("w13_weight_bias", "w2_weight_bias"):
        biased = SimpleNamespace(**vars(layer), **{bias: torch.zeros(8, 4)})
        assert around_forward(lambda *given: "original", biased, hidden, topk, PLAIN) == "original"


PLAIN = SimpleNamespace(activation="silu", gemm1_alpha=None, apply_router_weight_on_input=False)


@pytest.mark.parametrize("tokens", [1, 31])
def test_the_ranks_of_an_expert_parallel_layer_add_up_to_the_layer(tokens):
    """One token takes SGLang's way, 31 the batched one; the last rank's experts get no token."""
    torch.manual_seed(0)
    layer, hidden_TH = layer_of(8, 16, 12), torch.randn(tokens, 16)
    weights_TK, experts_TK = torch.randn(tokens, 6).softmax(-1).topk(2)

    def loop(layer, hidden_TH, topk_output, config):
        return experts_reference(layer, hidden_TH, *topk_output[:2]).float()

    total = torch.zeros(tokens, 16)
    for first in range(0, 8, 2):
        held = SimpleNamespace(
            num_experts=8, w13_weight=layer.w13_weight[first : first + 2], w2_weight=layer.w2_weight[first : first + 2]
        )
        local_TK = torch.where((experts_TK >= first) & (experts_TK < first + 2), experts_TK - first, -1)
        total += around_forward(loop, held, hidden_TH, (weights_TK, local_TK, None), PLAIN)
    expected = experts_reference(layer, hidden_TH, weights_TK, experts_TK)
    torch.testing.assert_close(total.double(), expected, atol=1e-4, rtol=1e-5)


def test_uniforms_are_uniform_and_uncorrelated_over_seeds_and_positions():
    grid = uniforms(torch.arange(200).repeat_interleave(200), torch.arange(200).repeat(200)).view(200, 200)
    assert grid.min() >= 0
    assert grid.max() < 1
    counts = torch.histc(grid.flatten().float(), bins=20, min=0, max=1)
    # 40,000 draws, 2,000 a bin: standard deviation 44.
    assert (counts - 2000).abs().max() < 5 * 44
    for other in (grid.roll(1, 0), grid.roll(1, 1)):
        correlation = torch.corrcoef(torch.stack([grid.flatten(), other.flatten()]))[0, 1]
        assert correlation.abs() < 5 / 200


def test_samples_follow_the_distribution_and_never_have_weight_zero():
    probs = torch.tensor([0.0, 0.1, 0.0, 0.6, 0.3, 0.0])
    drawn = sample(probs.expand(40_000, -1), torch.arange(40_000), torch.full((40_000,), 17))[:, 0]
    frequencies = torch.bincount(drawn, minlength=6) / 40_000
    torch.testing.assert_close(frequencies, probs, atol=5 * (0.25 / 40_000) ** 0.5, rtol=0)
    assert frequencies[[0, 2, 5]].sum() == 0


def test_a_sample_depends_on_its_own_row_alone():
    probs, seeds, positions = torch.rand(50, 30), torch.arange(50), torch.arange(50) * 3
    whole = sample(probs, seeds, positions)
    assert torch.equal(whole[[7, 3]], sample(probs[[7, 3]], seeds[[7, 3]], positions[[7, 3]]))
