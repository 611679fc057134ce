"""The patches of megatron-core: the machinery refuses changed sources, and what is patched computes the right thing."""

import contextlib
import importlib
import inspect
import itertools
import math
import queue
import sys
from types import SimpleNamespace

import pytest
import torch

import megatron_patches
from megatron_patches import collectives
from megatron_patches.first_import import _compile_does_nothing, _hidden
from megatron_patches.page import PAGE, with_patches
from megatron_patches.patching import patch_attr, patch_source
from megatron_patches.zigzag import zigzag_indices
from slimrl.config.schema.trainer import OptimizerConfig, TrainerConfig


def test_a_second_application_changes_nothing():
    assert megatron_patches.apply() == megatron_patches.apply()


def test_an_unknown_version_is_refused_by_name(monkeypatch):
    import megatron.core

    monkeypatch.setattr(megatron.core, "__version__", "9.9.9")
    with pytest.raises(RuntimeError, match=r"9\.9\.9 is installed; the patches are for 0\.19\.2"):
        megatron_patches.apply()


def noting(done, letter):
    def patch():
        done.append(letter)

    return patch


@pytest.mark.parametrize(("cuda", "engine", "groups"), [(True, True, "at"), (True, False, "ab"), (False, False, "abc")])
def test_a_gpu_without_transformer_engine_gets_what_stands_in_for_it(monkeypatch, cuda, engine, groups):
    """A GPU alone does not make Megatron's own layers take packed sequences."""
    done = []
    groups_of = {"a": "ANY_DEVICE", "t": "WITH_TRANSFORMER_ENGINE", "b": "WITHOUT_TRANSFORMER_ENGINE", "c": "CPU_ONLY"}
    for letter, name in groups_of.items():
        monkeypatch.setattr(megatron_patches, name, (noting(done, letter),))
    monkeypatch.setattr(megatron_patches, "_applied", [])
    monkeypatch.setattr(megatron_patches, "import_megatron", lambda: None)
    monkeypatch.setattr(megatron_patches.device, "device_type", lambda: "cuda" if cuda else "cpu")
    monkeypatch.setattr(megatron_patches.device, "has_transformer_engine", lambda: engine)
    monkeypatch.setattr(megatron_patches.device, "load_transformer_engine", lambda: None)
    megatron_patches.apply()
    assert "".join(done) == groups


def test_what_stands_in_for_transformer_engine_is_not_left_out_with_a_gpu():
    names = {patch.__name__ for patch in megatron_patches.patches(cuda=True, transformer_engine=False)}
    assert names >= {"offer_core_attention", "keep_steps_of_torch_adam", "name_replicated_linear"}
    assert not names & {"replace_torch_cuda", "accept_cpu_shards", "track_the_cpu_generator"}


def test_layers_of_megatron_attend_with_transformer_engine_where_it_is_installed(monkeypatch):
    from megatron.core.models import backends

    monkeypatch.setattr(backends.LocalSpecProvider, "core_attention", None)
    attention = type("Attention", (), {})
    monkeypatch.setattr(backends, "TEDotProductAttention", attention)
    megatron_patches.layers.offer_attention_of_transformer_engine()
    assert backends.get_backend("local").core_attention() is attention


def test_local_layers_of_sparse_attention_are_known_where_transformer_engine_is_installed(monkeypatch):
    """There absorbed_mla.py knows another class by the name of `Linear`."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer.experimental_attention_variant import absorbed_mla

    monkeypatch.setattr(absorbed_mla, "Linear", type("Linear", (), {}))
    monkeypatch.setattr(megatron_patches.layers, "patch_attr", lambda *given: None)
    megatron_patches.layers.offer_sparse_attention()
    assert absorbed_mla.Linear is LocalSpecProvider().linear()


def test_a_function_that_megatron_compiles_runs_as_it_is_without_a_gpu():
    from megatron.core.activations import squared_relu

    if torch.cuda.is_available():
        pytest.skip("there it is compiled")
    megatron_patches.apply()
    if hasattr(squared_relu, "_torchdynamo_orig_callable"):  # megatron.core was imported before
        assert torch._dynamo.eval_frame._stance.stance == "force_eager"
    assert squared_relu(torch.tensor([-1.0, 3.0])).tolist() == [0.0, 9.0]


def test_a_hidden_module_is_absent_for_as_long_as_it_is_hidden(monkeypatch):
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with _hidden("colorsys"), pytest.raises(ImportError):
        importlib.import_module("colorsys")
    assert importlib.import_module("colorsys").rgb_to_hls
    with _hidden("colorsys"):
        assert importlib.import_module("colorsys").rgb_to_hls


def test_a_literal_that_occurs_another_number_of_times_is_refused():
    with pytest.raises(RuntimeError, match="occurs 0 times, 1 expected"):
        patch_source("megatron_patches.zigzag", "zigzag_indices", ("no such text", "", 1))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_zigzag_pieces_cover_every_token_once_and_balance_causal_work(ranks):
    bounds = [0, 16, 40, 48]
    pieces = [zigzag_indices(bounds, ranks, rank) for rank in range(ranks)]
    assert torch.cat(pieces).sort().values.tolist() == list(range(48))
    assert len({int(piece.sum()) for piece in pieces}) == 1


def test_a_length_that_zigzag_cannot_cut_is_refused():
    with pytest.raises(ValueError, match="6 tokens cannot be divided over 2"):
        zigzag_indices([0, 8, 14], 2, 0)


def one_rank():
    return SimpleNamespace(size=lambda: 1, rank=lambda: 0)


def naive_attention(query, key, value, bounds, scale, window=None, sinks=None):
    """Softmax attention token by token in float64; key-value heads shared by groups of query heads.

    Args:
        window: tokens before its own that a query sees; None for all.
        sinks: score of each head beside those of the tokens; None without.
    """
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    output = torch.zeros(*query.shape[:2], value.shape[2], dtype=torch.float64)
    for start, end in itertools.pairwise(bounds):
        for t in range(start, end):
            first = start if window is None else max(start, t - window)
            scores = torch.einsum("hd,shd->hs", query[t], key[first : t + 1]) * scale
            if sinks is not None:
                scores = torch.cat([scores, sinks[:, None]], dim=-1)
            shares = scores.softmax(-1)[:, : t + 1 - first]
            output[t] = torch.einsum("hs,she->he", shares, value[first : t + 1])
    return output.flatten(1)


@pytest.mark.parametrize(("value_channels", "scale"), [(8, None), (5, None), (5, 0.7)])
def test_packed_attention_equals_token_by_token_attention_with_its_gradient(value_channels, scale):
    """`scale` is given by models whose positions are stretched (YaRN); others divide by the root of the channels."""
    megatron_patches.apply()
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_patches.core_attention import CoreAttention

    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, attention_dropout=0.0)
    groups = SimpleNamespace(tp=one_rank(), cp=one_rank())
    attention = CoreAttention(config, 1, None, "self", softmax_scale=scale, k_channels=8, pg_collection=groups)
    bounds = [0, 3, 4, 11]
    generator = torch.Generator().manual_seed(0)
    shapes = ((11, 4, 8), (11, 2, 8), (11, 2, value_channels))
    inputs = [torch.randn(*shape, generator=generator, requires_grad=True) for shape in shapes]
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    packed = SimpleNamespace(cu_seqlens_q=torch.tensor(bounds), cu_seqlens_q_padded=None)
    weights = torch.randn(11, 4 * value_channels, generator=generator)
    ours = attention(*inputs, None, packed_seq_params=packed)
    theirs = naive_attention(*doubles, bounds, 1 / math.sqrt(8) if scale is None else scale)
    torch.testing.assert_close(ours.double(), theirs, atol=1e-6, rtol=1e-5)
    (ours * weights).sum().backward()
    (theirs * weights).sum().backward()
    for x, y in zip(inputs, doubles, strict=True):
        torch.testing.assert_close(x.grad.double(), y.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 0, 3])
def test_windows_and_sinks_are_those_of_token_by_token_attention_with_their_gradients(window, sinks):
    megatron_patches.apply()
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_patches.core_attention import CoreAttention

    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, attention_dropout=0.0,
        window_size=None if window is None else (window, 0), window_attn_skip_freq=[0, 1],
        softmax_type="learnable" if sinks else "vanilla",
    )  # fmt: skip
    groups, bounds = SimpleNamespace(tp=one_rank(), cp=one_rank()), [0, 3, 4, 11]
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(11, heads, 8, generator=generator, requires_grad=True) for heads in (4, 2, 2)]
    scores_H, weights = torch.randn(4, generator=generator), torch.randn(11, 32, generator=generator)
    packed = SimpleNamespace(cu_seqlens_q=torch.tensor(bounds), cu_seqlens_q_padded=None)
    for layer, seen in ((1, None), (2, window)):
        attention = CoreAttention(config, layer, None, "self", pg_collection=groups)
        doubles = [x.detach().double().requires_grad_() for x in inputs]
        doubled = scores_H.double().requires_grad_()
        if sinks:
            attention.softmax_offset.data.copy_(scores_H)
        ours = attention(*inputs, None, packed_seq_params=packed)
        theirs = naive_attention(*doubles, bounds, 1 / math.sqrt(8), seen, doubled if sinks else None)
        torch.testing.assert_close(ours.double(), theirs, atol=1e-6, rtol=1e-5)
        for x in inputs:
            x.grad = None
        (ours * weights).sum().backward()
        (theirs * weights).sum().backward()
        for x, y in zip(inputs, doubles, strict=True):
            torch.testing.assert_close(x.grad.double(), y.grad, atol=1e-5, rtol=1e-4)
        if sinks:
            torch.testing.assert_close(attention.softmax_offset.grad.double(), doubled.grad, atol=1e-5, rtol=1e-4)
        else:
            assert not list(attention.parameters())


def test_the_page_about_patches_is_current():
    page = PAGE.read_text()
    assert page == with_patches(page), "run: python -m megatron_patches.page"


def test_an_optimizer_on_the_host_starts_from_zero_moments_and_its_state_is_plain_values(tmp_path):
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    megatron_patches.apply()
    weight = torch.randn(4, 3).bfloat16()
    before = weight.clone()
    adam = torch.optim.AdamW
    optimizer = HybridDeviceOptimizer(
        [weight],
        offload_fraction=1.0,
        cpu_optimizer_cls=adam,
        gpu_optimizer_cls=adam,
        param_update_in_fp32=True,
        pin_cpu_grads=torch.cuda.is_available(),
        overlap_cpu_optimizer_d2h_h2d=False,
        lr=1e-2,
        fused=True,
    )
    optimizer.dummy_step()
    assert torch.equal(weight, before)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    (state,) = torch.load(tmp_path / "state.pt", weights_only=True)["state"].values()
    assert torch.equal(state["master_param"], before.float())
    assert not state["exp_avg"].any()
    assert not state["exp_avg_sq"].any()
    assert state["step"] == 0


CPU_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="there these patches are left out")


def core_attention(cp, **options):
    megatron_patches.apply()
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_patches.core_attention import CoreAttention

    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, attention_dropout=0.0)
    return CoreAttention(config, 1, None, "self", pg_collection=SimpleNamespace(tp=one_rank(), cp=cp), **options)


def heads(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator) for shape in shapes]


def test_sequences_end_where_their_padding_does():
    inputs = heads((11, 4, 8), (11, 2, 8), (11, 2, 8))
    padded = [0, 4, 11]
    packed = SimpleNamespace(cu_seqlens_q=torch.tensor([0, 3, 9]), cu_seqlens_q_padded=torch.tensor(padded))
    found = core_attention(one_rank(), k_channels=8)(*inputs, None, packed_seq_params=packed)
    expected = naive_attention(*(x.double() for x in inputs), padded, 1 / math.sqrt(8))
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-5)


def test_padded_sequences_attend_as_each_alone_does():
    """Lengths that share a call, that do not, that are too long to be padded, and none at all; gradients too."""
    lengths = [3, 40, 32, 1, 0, 33, 64, 513, 30, 600]
    bounds = [0, *itertools.accumulate(lengths)]
    inputs = [x.requires_grad_() for x in heads((bounds[-1], 4, 8), (bounds[-1], 2, 8), (bounds[-1], 2, 5))]
    packed = SimpleNamespace(cu_seqlens_q=torch.tensor(bounds), cu_seqlens_q_padded=None)
    found = core_attention(one_rank(), k_channels=8)(*inputs, None, packed_seq_params=packed)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = naive_attention(*exact, bounds, 1 / math.sqrt(8))
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-5)
    (weights,) = heads(found.shape)
    gradients = torch.autograd.grad((found * weights).sum(), inputs)
    for gradient, right in zip(gradients, torch.autograd.grad((expected * weights).sum(), exact), strict=True):
        torch.testing.assert_close(gradient.double(), right, atol=1e-5, rtol=1e-4)


def test_sequences_of_about_one_length_share_a_call():
    from megatron_patches.core_attention import padded_groups

    bounds = [0, 5, 45, 76, 676, 1276, 1300]  # lengths 5, 40, 31, 600, 600, 24
    groups_BL, rows_T = padded_groups(bounds)
    assert [tuple(tokens_BL.shape) for tokens_BL in groups_BL] == [(3, 32), (1, 64), (2, 600)]
    assert torch.equal(torch.cat([tokens_BL.flatten() for tokens_BL in groups_BL])[rows_T], torch.arange(1300))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("options", [{}, {"mla_rotary_interleaved": True, "mscale": 1.3}, {"rotary_interleaved": True}])
def test_packed_sequences_are_rotated_together_to_the_bits_of_each_alone(ranks, options):
    megatron_patches.apply()
    from megatron.core.models.common.embeddings import rope_utils

    at_once = rope_utils._apply_rotary_pos_emb_thd
    one_by_one = inspect.unwrap(at_once)
    assert one_by_one is not at_once
    bounds = torch.tensor([0, 12, 36, 40, 64], dtype=torch.int32)
    whole, freqs = heads((64, 3, 16), (24, 1, 1, 8))
    for rank in range(ranks):
        group = SimpleNamespace(size=lambda: ranks, rank=lambda rank=rank: rank)
        tokens = whole[: 64 // ranks].requires_grad_()
        results = [rotate(tokens, bounds, freqs, cp_group=group, **options) for rotate in (at_once, one_by_one)]
        assert torch.equal(*results)
        assert torch.equal(*(torch.autograd.grad(result.square().sum(), tokens)[0] for result in results))


def test_frequencies_of_a_whole_micro_batch_stay_those_of_their_tokens():
    """As many frequencies as tokens: Megatron takes them as they are, also in the second sequence."""
    megatron_patches.apply()
    from megatron.core.models.common.embeddings import rope_utils

    tokens, freqs = heads((10, 2, 8), (10, 1, 1, 8))
    found = rope_utils._apply_rotary_pos_emb_thd(tokens, torch.tensor([0, 4, 10]), freqs, cp_group=one_rank())
    assert torch.equal(found, rope_utils._apply_rotary_pos_emb_bshd(tokens[:, None], freqs)[:, 0])


@pytest.mark.parametrize("ranks", [2, 3])
def test_queries_of_a_context_parallel_rank_attend_to_all_that_lies_before_them(monkeypatch, ranks):
    """Keys have other sizes than values, by which the stand-in for the gathering tells them apart."""
    attention = core_attention(one_rank(), k_channels=8)
    bounds = [0, 12, 36, 48]
    query, key, value = heads((48, 4, 8), (48, 2, 8), (48, 2, 5))
    packed = SimpleNamespace(cu_seqlens_q=torch.tensor(bounds), cu_seqlens_q_padded=None)
    whole = naive_attention(query.double(), key.double(), value.double(), bounds, 1 / math.sqrt(8))
    places = [zigzag_indices(bounds, ranks, rank) for rank in range(ranks)]

    def gather(x, group):
        return (key if x.shape[-1] == 8 else value)[torch.cat(places)]

    monkeypatch.setattr("megatron_patches.core_attention.gather_from_sequence_parallel_region", gather)
    for rank, place in enumerate(places):
        attention.cp_group = SimpleNamespace(size=lambda: ranks, rank=lambda rank=rank: rank)
        found = attention(query[place], key[place], value[place], None, packed_seq_params=packed)
        torch.testing.assert_close(found.double(), whole[place], atol=1e-6, rtol=1e-5)


def test_a_batch_of_equal_lengths_is_attended_sequence_by_sequence():
    query, key, value = heads((7, 3, 4, 8), (7, 3, 2, 8), (7, 3, 2, 5))
    found = core_attention(one_rank(), softmax_scale=0.3)(query, key, value, None)
    assert found.shape == (7, 3, 20)
    for sequence in range(3):
        inputs = (x[:, sequence].double() for x in (query, key, value))
        torch.testing.assert_close(
            found[:, sequence].double(), naive_attention(*inputs, [0, 7], 0.3), atol=1e-6, rtol=1e-5
        )


def test_attention_drops_out_in_training_alone():
    inputs = heads((64, 1, 4, 8), (64, 1, 4, 8), (64, 1, 4, 8))
    without = core_attention(one_rank())
    given = core_attention(one_rank(), attention_dropout=0.5)
    assert (without.dropout, given.dropout) == (0.0, 0.5)
    expected = without(*inputs, None)
    assert not torch.allclose(given(*inputs, None), expected)
    assert torch.equal(given.eval()(*inputs, None), expected)


def test_what_the_attention_does_not_take_is_refused():
    inputs = heads((4, 1, 4, 8), (4, 1, 4, 8), (4, 1, 4, 8))
    with pytest.raises(ValueError, match="takes no bias"):
        core_attention(one_rank())(*inputs, None, attention_bias=torch.zeros(4, 4))
    two = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    with pytest.raises(ValueError, match="needs packed sequences"):
        core_attention(two)(*inputs, None)
    packed = SimpleNamespace(cu_seqlens_q=torch.tensor([0, 4]), cu_seqlens_q_padded=None)
    with pytest.raises(AssertionError):
        core_attention(two)(*(x[:, 0] for x in inputs), None, packed_seq_params=packed)


def draws(seed, *counts):
    """What a generator gives, so many numbers at a time."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(count, generator=generator) for count in counts]


@CPU_ONLY
def test_a_tracked_random_state_takes_the_generator_s_place_and_gives_it_back():
    megatron_patches.apply()
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    before = torch.get_rng_state()
    tracker = CudaRNGStatesTracker()
    torch.manual_seed(1)
    tracker.add("a", 2)
    tracker.add("b", 3)
    outer, inner, other = draws(1, 1, 1, 1), draws(2, 2, 3, 4, 5), draws(3, 2, 2)
    assert torch.equal(torch.rand(1), outer[0])
    with tracker.fork("a"):
        assert torch.equal(torch.rand(2), inner[0])
    assert torch.equal(torch.rand(1), outer[1])
    with tracker.fork("a"):
        assert torch.equal(torch.rand(3), inner[1])
        with tracker.fork("b"):
            assert torch.equal(torch.rand(2), other[0])
        assert torch.equal(torch.rand(4), inner[2])
    with contextlib.suppress(KeyError), tracker.fork("a"):
        assert torch.equal(torch.rand(5), inner[3])
        raise KeyError
    assert torch.equal(torch.rand(1), outer[2])
    with tracker.fork("b"):
        assert torch.equal(torch.rand(2), other[1])
    with pytest.raises(AssertionError, match="random state c was not added"), tracker.fork("c"):
        pass
    torch.set_rng_state(before)


@CPU_ONLY
def test_norms_are_torch_s_and_say_whether_their_gradients_are_added_up():
    megatron_patches.apply()
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    options = ("layernorm_zero_centered_gamma", "persist_layer_norm", "memory_efficient_layer_norm")
    plain = {**dict.fromkeys(options, False), "params_dtype": torch.bfloat16, "sequence_parallel": True}
    for name, kind in (("RMSNorm", torch.nn.RMSNorm), ("LayerNorm", torch.nn.LayerNorm)):
        norm = WrappedTorchNorm(SimpleNamespace(**plain, normalization=name), 16, eps=1e-3)
        assert type(norm) is kind
        assert (norm.eps, tuple(norm.weight.shape), norm.weight.dtype) == (1e-3, (16,), torch.bfloat16)
        assert all(parameter.sequence_parallel for parameter in norm.parameters())
    alone = SimpleNamespace(**{**plain, "sequence_parallel": False}, normalization="RMSNorm")
    assert not WrappedTorchNorm(alone, 16).weight.sequence_parallel
    for option in options:
        kind = "LayerNorm" if option == "layernorm_zero_centered_gamma" else "RMSNorm"
        with pytest.raises(ValueError, match=f"{option} needs Transformer Engine or Apex"):
            WrappedTorchNorm(SimpleNamespace(**{**plain, option: True}, normalization=kind), 16)


def test_a_router_with_float32_weights_multiplies_bfloat16_tokens_beside_transformer_engine(monkeypatch):
    """The stand-in for Transformer Engine's product takes what cuBLAS takes, operands of one dtype."""
    megatron_patches.apply()
    from megatron.core.transformer.moe import moe_utils

    products = {"TN": lambda a, b: b @ a.T, "NN": lambda a, b: b @ a, "NT": lambda a, b: b.T @ a}
    calls = []

    def general_gemm(a, b, dtype, layout, bias=None, grad=False):
        assert a.dtype is b.dtype
        calls.append(layout)
        return (products[layout](a.to(dtype), b.to(dtype)),)

    monkeypatch.setattr(moe_utils, "te_general_gemm", general_gemm)
    for weight_dtype, expected_calls in ((torch.float32, ["NN", "NT"]), (torch.bfloat16, ["TN", "NN", "NT"])):
        calls.clear()
        tokens, weight, upstream = heads((5, 2, 16), (4, 16), (5, 2, 4))
        tokens, weight = tokens.bfloat16().requires_grad_(), weight.to(weight_dtype).requires_grad_()
        exact = [x.detach().double().requires_grad_() for x in (tokens, weight)]
        logits = moe_utils.router_gating_linear(tokens, weight, None, torch.float32)
        expected = torch.nn.functional.linear(*exact)
        assert logits.dtype is torch.float32
        torch.testing.assert_close(logits.double(), expected, atol=1e-5, rtol=1e-5)
        found = torch.autograd.grad((logits * upstream).sum(), (tokens, weight))
        for one, right in zip(found, torch.autograd.grad((expected * upstream).sum(), exact), strict=True):
            torch.testing.assert_close(one.double(), right, atol=1e-2, rtol=1e-2)
        assert calls == expected_calls


def test_a_zero_centred_norm_is_qwen3_next_s():
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

    from megatron_patches.layers import ZeroCentredRMSNorm

    for dtype in (torch.float32, torch.bfloat16):
        norm, theirs = ZeroCentredRMSNorm(16, eps=1e-3, dtype=dtype), Qwen3NextRMSNorm(16, eps=1e-3).to(dtype)
        assert not norm.weight.any()
        for parameter in (norm.weight, theirs.weight):
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
        x = (3 * torch.randn(5, 16)).to(dtype)
        torch.testing.assert_close(norm(x), theirs(x), rtol=1e-6 if dtype is torch.float32 else 1e-2, atol=1e-6)
        assert norm(x).dtype is dtype


def test_the_decay_of_a_delta_net_is_computed_in_float32_from_a_bfloat16_parameter():
    megatron_patches.apply()
    from megatron_patches.delta_net import DeltaNet

    A_log, dt_bias, alpha, beta = (torch.randn(64).bfloat16() for _ in range(4))
    decay, step = DeltaNet._compute_g_and_beta(None, A_log, dt_bias, alpha, beta)
    expected = -A_log.double().exp() * torch.nn.functional.softplus(alpha.double() + dt_bias.double())
    assert decay.dtype is torch.float32
    torch.testing.assert_close(decay.double(), expected, rtol=1e-5, atol=1e-7)
    assert torch.equal(step, beta.sigmoid())


def test_delta_nets_stand_where_the_config_has_them_and_keep_the_keys_of_transformer_engine():
    megatron_patches.apply()
    from megatron.core.models.gpt import gpt_layer_specs

    from megatron_patches.delta_net import DeltaNet
    from slimrl.models.family import family_of
    from slimrl.models.hf_config import published_config
    from slimrl.trainer.build import transformer_config

    hf_config = {**published_config("Qwen3-Next-80B-A3B"), "num_hidden_layers": 5}
    trainer = TrainerConfig(max_tokens_per_rank=1, optimizer=OptimizerConfig(lr=0.0))
    config = transformer_config(trainer, family_of(hf_config).megatron_config(hf_config))
    layers = gpt_layer_specs.get_gpt_decoder_layer_specs(config, False, "RMSNorm")
    kinds = [layer.submodules.self_attention.module is DeltaNet for layer in layers]
    assert kinds == [True, True, True, False, True]
    keys = [layer.submodules.sharded_state_dict_keys_map["input_layernorm."] for layer in layers]
    assert keys[2:4] == ["self_attention.in_proj.layer_norm_", "self_attention.linear_qkv.layer_norm_"]
    assert config.experimental_attention_variant == "gated_delta_net"


def test_down_projections_of_latent_attention_are_whole_on_every_rank():
    megatron_patches.apply()
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.post_training.modelopt.layers import Linear

    def attention(latent):
        return get_gpt_layer_local_spec(multi_latent_attention=latent).submodules.self_attention.submodules

    latent = attention(True)
    assert latent.linear_q_down_proj is latent.linear_kv_down_proj is Linear
    assert Linear not in (latent.linear_q_up_proj, latent.linear_kv_up_proj, latent.linear_proj)
    assert Linear not in vars(attention(False)).values()


@pytest.mark.parametrize("fused", [None, "norm and projection"])
@pytest.mark.parametrize("lora", [None, 24])
def test_a_query_that_is_not_compressed_has_no_norm_with_either_spec(monkeypatch, fused, lora):
    """Moonlight's config.json has `q_lora_rank: null`; its checkpoint then has `q_proj` and `kv_a_layernorm` alone."""
    megatron_patches.apply()
    from megatron.core.transformer import mla_qk_norm_config as qk_norm
    from megatron.core.transformer.identity_op import IdentityOp

    names = {"layer_norm": "norm", "column_parallel_linear": "projection", "column_parallel_layer_norm_linear": fused}
    backend = SimpleNamespace(**{name: lambda value=value, **how: value for name, value in names.items()})
    monkeypatch.setattr(qk_norm, "get_backend", lambda implementation: backend)
    config = SimpleNamespace(
        q_lora_rank=lora, qk_layernorm=True, qk_l2_norm=False, normalization="RMSNorm", transformer_impl="",
        experimental_attention_variant=None,
    )  # fmt: skip
    norm = IdentityOp if fused else "norm"
    given = SimpleNamespace(
        linear_q_proj="projection", linear_q_up_proj=fused or "projection", linear_kv_up_proj=fused or "projection",
        q_layernorm=norm, kv_layernorm=norm,
    )  # fmt: skip
    found = qk_norm.QKNormConfigResolver(config, given).resolve()
    assert found["linear_q_proj"] == ("projection" if lora is None else IdentityOp)
    assert found["linear_q_up_proj"] == (IdentityOp if lora is None else fused or "projection")
    assert (found["linear_kv_up_proj"], found["kv_layernorm"]) == (fused or "projection", norm)


@CPU_ONLY
def test_unequal_pieces_are_gathered_and_added_up_in_the_order_of_their_ranks(monkeypatch):
    megatron_patches.apply()
    from megatron.core.tensor_parallel import mappings

    pieces = [torch.full((1, 2), 1.0), torch.full((3, 2), 2.0), torch.full((2, 2), 3.0)]
    group = SimpleNamespace(size=lambda: 3, rank=lambda: 1)

    def all_gather(parts, own, group):
        assert own.shape == (3, 2)
        for part, piece in zip(parts, pieces, strict=True):
            part[: len(piece)] = piece
        assert torch.equal(own[:3], pieces[1])

    monkeypatch.setattr(torch.distributed, "all_gather", all_gather)
    found = mappings._gather_along_first_dim(pieces[1], group, [1, 3, 2])
    assert torch.equal(found, torch.cat(pieces))
    gradient = torch.arange(12.0).reshape(6, 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda total, group: total.mul_(10))
    assert torch.equal(mappings._reduce_scatter_along_first_dim(gradient, group, [1, 3, 2]), 10 * gradient[1:4])
    # What a rank gives stays as it is.
    assert torch.equal(gradient, torch.arange(12.0).reshape(6, 2))
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    assert mappings._gather_along_first_dim(gradient, alone, [6]) is gradient
    assert mappings._reduce_scatter_along_first_dim(gradient, alone, [6]) is gradient


@CPU_ONLY
def test_equal_pieces_go_megatron_s_own_way(monkeypatch):
    megatron_patches.apply()
    from megatron.core.tensor_parallel import mappings

    group = SimpleNamespace(size=lambda: 2, rank=lambda: 1)
    mine, other = torch.ones(2, 3), torch.zeros(2, 3)
    monkeypatch.setattr(
        mappings, "dist_all_gather_func", lambda whole, own, group: whole.copy_(torch.cat([other, own]))
    )
    monkeypatch.setattr(
        mappings, "dist_reduce_scatter_func", lambda part, whole, group: part.copy_(whole.chunk(2)[group.rank()])
    )
    assert torch.equal(mappings._gather_along_first_dim(mine, group), torch.cat([other, mine]))
    assert torch.equal(mappings._reduce_scatter_along_first_dim(torch.cat([other, mine]), group), mine)


@CPU_ONLY
def test_gradients_of_one_rank_stay_where_they_are_and_others_go_megatron_s_own_way(monkeypatch):
    megatron_patches.apply()
    from megatron.core.distributed import param_and_grad_buffer

    seen = []
    monkeypatch.setattr(torch.distributed, "reduce_scatter_tensor", lambda part, whole, **_: seen.append(len(part)))
    monkeypatch.setattr(param_and_grad_buffer, "dist_reduce_scatter_func", torch.distributed.reduce_scatter_tensor)
    collectives.leave_gradients_of_one_rank()
    reduce, whole = param_and_grad_buffer.dist_reduce_scatter_func, torch.ones(6)
    assert reduce(whole.view(-1), whole, group=one_rank(), async_op=False) is None
    assert seen == []
    two = SimpleNamespace(size=lambda: 2, rank=lambda: 1)
    reduce(whole[3:], whole, group=two, async_op=False)
    reduce(whole.view(-1), whole, group=one_rank(), async_op=True)
    reduce(torch.zeros(6), whole, group=one_rank(), async_op=False)
    assert seen == [3, 6, 6]


def test_attention_of_a_cpu_in_bfloat16_is_that_of_float32_rounded_once():
    megatron_patches.apply()
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_patches.core_attention import CoreAttention

    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, attention_dropout=0.0)
    attention = CoreAttention(
        config, 1, None, "self", k_channels=8, pg_collection=SimpleNamespace(tp=one_rank(), cp=one_rank())
    )
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(40, heads, 8, generator=generator).bfloat16() for heads in (4, 2, 2)]
    packed = SimpleNamespace(cu_seqlens_q=torch.tensor([0, 33, 40]), cu_seqlens_q_padded=None)
    found = attention(*inputs, None, packed_seq_params=packed)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, attention(*(x.float() for x in inputs), None, packed_seq_params=packed).bfloat16())


@CPU_ONLY
def test_split_sizes_become_numbers_where_they_are_asked_for():
    megatron_patches.apply()
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    sizes = torch.tensor([3, 1, 2])
    for module in (moe_utils, token_dispatcher):
        assert module.maybe_move_tensor_to_cpu(sizes, as_numpy=True).tolist() == [3, 1, 2]
        assert not torch.is_tensor(module.maybe_move_tensor_to_cpu(sizes, as_numpy=True))
        assert module.maybe_move_tensor_to_cpu(sizes) is sizes
        assert module.maybe_move_tensor_to_cpu(None, as_numpy=True) is None


@CPU_ONLY
def test_calls_for_a_gpu_mean_the_cpu():
    megatron_patches.apply()
    assert torch.zeros(1, device=torch.cuda.current_device()).device.type == "cpu"
    assert not torch.cuda.is_available()
    assert torch.cuda.device_count() == 0
    torch.cuda.set_device(3)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.nvtx.range_push("a")
    torch.cuda.nvtx.range_pop()
    stream, event = torch.cuda.Stream(priority=1), torch.cuda.Event(enable_timing=True)
    assert stream.wait_event(event) is stream
    assert isinstance(torch.cuda.current_stream(), type(torch.cuda.default_stream()))
    with torch.cuda.stream(stream):
        event.record(stream)
    assert type(stream) is torch.cuda.Stream
    assert type(event) is torch.cuda.Event
    assert torch.cuda.memory_allocated() == torch.cuda.max_memory_reserved(0) == 0
    weight, module = torch.ones(2), torch.nn.Linear(1, 1)
    assert weight.cuda(non_blocking=True) is weight
    assert module.cuda(0) is module
    with pytest.raises(AttributeError):
        stream.__len__  # noqa: B018
    before = torch.get_rng_state()
    torch.cuda.manual_seed(5)
    assert torch.equal(torch.rand(2), draws(5, 2)[0])
    torch.cuda.manual_seed_all(6)
    state = torch.cuda.get_rng_state()
    assert torch.equal(torch.rand(2), draws(6, 2)[0])
    for put_back in (torch.cuda.set_rng_state, torch.cuda.random.set_rng_state):
        put_back(state)
        assert torch.equal(torch.cuda.random.get_rng_state(), state)
        assert torch.equal(torch.rand(2), draws(6, 2)[0])
    torch.set_rng_state(before)


def test_results_of_a_save_stay_in_this_process():
    megatron_patches.apply()
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    first, second = filesystem_async.get_write_results_queue(), filesystem_async.get_write_results_queue("spawn")
    assert type(first) is type(second) is queue.Queue
    # Two may be written at a time.
    assert first is not second


def test_the_compiler_is_out_of_the_way_for_one_import_alone():
    real = torch.compile
    with _compile_does_nothing():
        assert torch.compile(max) is max
    assert torch.compile is real


SOURCE = """
import torch
from functools import lru_cache

class Base:
    def size(self):
        return 1

class Derived(Base):
    def size(self):
        return super().size() + 10

    @staticmethod
    def plain(value):
        return value + 10

    @classmethod
    def named(cls):
        return cls.__name__ + "10"

    @lru_cache
    def cached(self):
        return 10

@torch.no_grad()
def graph(x):
    return x * 10

def ten():
    \"\"\"Ten.\"\"\"
    return [
        10
        for _ in range(1)
    ]
"""


@pytest.fixture
def source_module(tmp_path, monkeypatch):
    (tmp_path / "patched_source.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("patched_source")
    del sys.modules["patched_source"]


def test_a_patched_function_keeps_its_kind_its_class_and_its_names(source_module):
    change = ("10", "20", 1)
    for name in ("Derived.plain", "Derived.named", "graph", "ten"):
        patch_source("patched_source", name, change)
    # One change after the other.
    patch_source("patched_source", "Derived.size", change, ("+ 20", "- 3", 1))
    derived = source_module.Derived()
    assert derived.size() == -2
    assert (source_module.Derived.plain(1), derived.plain(1)) == (21, 21)
    assert source_module.Derived.named() == "Derived20"
    result = source_module.graph(torch.ones(1, requires_grad=True))
    assert (result.item(), result.requires_grad) == (20.0, False)
    assert source_module.ten() == [20]
    assert (source_module.ten.__module__, source_module.ten.__qualname__) == ("patched_source", "ten")
    assert source_module.Derived.size.__qualname__ == "Derived.size"


def test_a_function_whose_decorator_would_be_lost_is_refused(source_module):
    with pytest.raises(RuntimeError, match=r"decorators \['@lru_cache'\] would be lost"):
        patch_source("patched_source", "Derived.cached", ("10", "20", 1))
    with pytest.raises(RuntimeError, match="occurs 1 times, 2 expected"):
        patch_source("patched_source", "ten", ("10", "20", 2))
    assert source_module.ten() == [10]


def test_a_function_is_replaced_wherever_megatron_imported_it_and_nowhere_else(monkeypatch):
    def old():
        return "old"

    def new():
        return "new"

    owner, copy, stranger = (
        SimpleNamespace(__name__=name, function=old, again=old, number=1)
        for name in ("megatron.core.owner", "megatron.core.copy", "elsewhere.copy")
    )
    for module in (owner, copy, stranger):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    patch_attr(owner, "function", new)
    for module, expected in ((owner, new), (copy, new), (stranger, old)):
        assert (module.function, module.again, module.number) == (expected, expected, 1)

    class Kind:
        function = new

    patch_attr(Kind, "function", old)
    assert Kind.function is old
    # A function of a class is not looked for in modules.
    assert copy.function is new
