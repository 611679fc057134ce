"""The patches of megatron-core: the machinery refuses changed sources, and what is patched computes the right thing."""

import importlib
import itertools
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import megatron_patches
from megatron_patches.first_import import _hidden
from megatron_patches.page import patches_page
from megatron_patches.respell import respell
from megatron_patches.zigzag import zigzag_indices


def test_a_second_application_changes_nothing():
    assert megatron_patches.apply() == megatron_patches.apply()


def test_an_unknown_version_is_refused_by_name(monkeypatch):
    import megatron.core

    monkeypatch.setattr(megatron.core, "__version__", "9.9.9")
    with pytest.raises(RuntimeError, match=r"9\.9\.9 is installed; patches exist for 0\.16\.1"):
        megatron_patches.apply()


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
        respell("megatron_patches.zigzag", "zigzag_indices", ("no such text", "", 1))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_zigzag_pieces_cover_every_token_once_and_balance_causal_work(ranks):
    bounds = [0, 16, 40, 48]
    pieces = [zigzag_indices(bounds, ranks, rank) for rank in range(ranks)]
    assert torch.cat(pieces).sort().values.tolist() == list(range(48))
    assert len({int(piece.sum()) for piece in pieces}) == 1


def test_a_length_that_zigzag_cannot_cut_is_refused():
    with pytest.raises(ValueError, match="6 tokens cannot be cut for 2"):
        zigzag_indices([0, 8, 14], 2, 0)


def one_rank():
    return SimpleNamespace(size=lambda: 1, rank=lambda: 0)


def naive_attention(query, key, value, bounds, scale):
    """Softmax attention token by token in float64; key-value heads shared by groups of query heads."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    output = torch.zeros(*query.shape[:2], value.shape[2], dtype=torch.float64)
    for start, end in itertools.pairwise(bounds):
        for t in range(start, end):
            scores = torch.einsum("hd,shd->hs", query[t], key[start : t + 1]) * scale
            output[t] = torch.einsum("hs,she->he", scores.softmax(-1), value[start : t + 1])
    return output.flatten(1)


@pytest.mark.parametrize(("value_channels", "scale"), [(8, None), (5, None), (5, 0.7)])
def test_packed_attention_equals_token_by_token_attention_with_its_gradient(value_channels, scale):
    """`scale` is given by models whose positions are stretched (YaRN); others divide by the root of the channels."""
    megatron_patches.apply()
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_patches.core_attention import CoreAttention

    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, attention_dropout=0.0)
    groups = SimpleNamespace(cp=one_rank())
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


def test_the_page_about_patches_is_current():
    assert (Path(__file__).parents[2] / "docs" / "patches.md").read_text() == patches_page()


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


def test_the_auxiliary_loss_counts_the_tokens_of_all_ranks_that_share_its_sequences(monkeypatch):
    megatron_patches.apply()
    from megatron.core.transformer.moe import router
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    monkeypatch.setattr(router, "save_to_aux_losses_tracker", lambda *about, **groups: None)
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", torch.tensor(1.0))
    of_four_ranks = SimpleNamespace(
        config=SimpleNamespace(num_layers=1, mtp_num_layers=None), layer_number=1, calculate_per_token_loss=True,
        tp_cp_group=SimpleNamespace(size=lambda: 4),
    )  # fmt: skip
    activation, loss = torch.ones(5, 3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    attach = router.TopKRouter.attach_and_log_load_balancing_loss
    attach(of_four_ranks, activation, 0.1, loss, "load_balancing_loss", None).sum().backward()
    # Five tokens here, and as many on each of the others.
    assert loss.grad.item() == 20.0
