"""Norms and rotary embedding of engines without a GPU, against transformers' own."""

from types import SimpleNamespace

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from slimrl.engines.plugin.cpu.native_layers import around_rms_norm, around_rotary


def refused(*args):
    raise AssertionError("the original was called")


def asked(*args):
    return "the original's"


def sglang_norm(norm, **options):
    plain = {"override_orig_dtype": None, "variance_size_override": None, "variance_epsilon": norm.variance_epsilon}
    return SimpleNamespace(weight=norm.weight.data, **{**plain, **options})


def test_a_norm_is_that_of_transformers_with_and_without_a_residual():
    torch.manual_seed(0)
    theirs = Qwen3RMSNorm(16, eps=1e-2)
    theirs.weight.data.normal_()
    x, residual = torch.randn(2, 7, 16)
    kept = x.clone()
    ours = sglang_norm(theirs)
    torch.testing.assert_close(around_rms_norm(refused, ours, x), theirs(x).detach(), rtol=1e-6, atol=1e-6)
    normed, total = around_rms_norm(refused, ours, x, residual)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed, theirs(x + residual).detach(), rtol=1e-6, atol=1e-6)
    assert torch.equal(x, kept)


def test_norms_that_convert_or_leave_channels_out_are_sglangs():
    norm = Qwen3RMSNorm(16)
    x = torch.randn(3, 16)
    assert around_rms_norm(asked, sglang_norm(norm), x.bfloat16()) == "the original's"
    assert around_rms_norm(asked, sglang_norm(norm), x, x, x) == "the original's"
    for option in ({"variance_size_override": 8}, {"override_orig_dtype": torch.bfloat16}):
        assert around_rms_norm(asked, sglang_norm(norm, **option), x) == "the original's"


def rotary(**options):
    angle_LD = torch.outer(torch.arange(40.0), 100.0 ** -(torch.arange(4) / 4))
    table = torch.cat([angle_LD.cos(), angle_LD.sin()], dim=1)
    return SimpleNamespace(
        **{"cos_sin_cache": table, "is_neox_style": True, "rotary_dim": 8, "head_size": 8, **options}
    )


def test_queries_and_keys_are_rotated_as_transformers_does():
    torch.manual_seed(0)
    positions = torch.tensor([0, 3, 39, 3, 17])
    query, key = torch.randn(5, 3 * 8), torch.randn(5, 2 * 8)
    found = around_rotary(refused, rotary(), positions, query, key)
    cos, sin = (half.repeat(1, 2)[None] for half in rotary().cos_sin_cache[positions].chunk(2, dim=1))
    heads = [x.view(1, 5, -1, 8).transpose(1, 2) for x in (query, key)]
    for ours, theirs, given in zip(found, apply_rotary_pos_emb(*heads, cos, sin), (query, key), strict=True):
        assert ours.shape == given.shape
        torch.testing.assert_close(ours, theirs[0].transpose(0, 1).flatten(1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("options", [{"is_neox_style": False}, {"rotary_dim": 4}])
def test_other_rotary_embeddings_are_sglangs(options):
    query, key = torch.randn(5, 24), torch.randn(5, 16)
    assert around_rotary(asked, rotary(**options), torch.arange(5), query, key) == "the original's"
    narrow = (query.bfloat16(), key.bfloat16())
    assert around_rotary(asked, rotary(), torch.arange(5), *narrow) == "the original's"
    assert around_rotary(asked, rotary(), torch.arange(5), query, key, torch.ones(5)) == "the original's"
    assert around_rotary(asked, rotary(), torch.arange(5), query, key, None, object()) == "the original's"
    assert around_rotary(asked, rotary(), torch.arange(5), query[None], key[None]) == "the original's"
