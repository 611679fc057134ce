"""Products with packed weights in engines without a GPU, against float64, and when the copies are dropped."""

import ast
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slimrl.engines.plugin.cpu import packed_linear
from slimrl.engines.plugin.cpu.packed_linear import MAX_ROWS, around_apply, around_lm_head, before_update

OUT, IN = 600, 576
UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"

LOADS = (".load_weights(", ".load_weights_and_postprocess(", "_model_load_weights_direct(", ".update_weights_from_ipc(")
"""What SGLang's updater calls to write an engine's weights."""


class UnquantizedEmbeddingMethod:
    """Has the name of SGLang's."""


@pytest.fixture(autouse=True)
def no_copies():
    before_update()
    yield
    before_update()


def refused(*args, **kwargs):
    raise AssertionError("the original was called")


def asked(*args, **kwargs):
    return "the original's"


def layer(dtype=torch.float32, shape=(OUT, IN)):
    torch.manual_seed(0)
    return SimpleNamespace(weight=torch.nn.Parameter(torch.randn(shape, dtype=dtype), requires_grad=False))


def assert_product(found, x, weight, bias=None):
    """Within rounding of the sums of float64."""
    expected = x.double() @ weight.double().T
    expected = expected if bias is None else expected + bias.double()
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    # A sum of IN products has a standard deviation of 24.
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 3, 16, MAX_ROWS])
def test_a_product_is_that_of_float64(rows):
    linear = layer()
    x, bias = torch.randn(rows, IN), torch.randn(OUT)
    for _ in range(2):
        # The second time from the copy that the first has made.
        assert_product(around_apply(refused, None, linear, x), x, linear.weight)
        assert_product(around_apply(refused, None, linear, x, bias), x, linear.weight, bias)


@pytest.mark.skipif(torch.bfloat16 not in packed_linear.packed_dtypes(), reason="this CPU has no products of bfloat16")
def test_a_product_in_bfloat16_is_that_of_float64_rounded_once():
    linear, x = layer(torch.bfloat16), torch.randn(16, IN).bfloat16()
    found = around_apply(refused, None, linear, x)
    assert found.dtype == torch.bfloat16
    expected = x.double() @ linear.weight.double().T
    # Half a unit in the last of eight bits, and what float32 sums lose.
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-4)


def test_a_product_in_bfloat16_is_the_originals_where_the_cpu_has_none(monkeypatch):
    monkeypatch.setattr(packed_linear, "packed_dtypes", lambda: (torch.float32,))
    x = torch.randn(4, IN).bfloat16()
    assert around_apply(asked, None, layer(torch.bfloat16), x) == "the original's"


def test_rows_of_a_wider_buffer_are_read_where_they_lie():
    linear, wide = layer(), torch.randn(5, 2 * IN)
    assert_product(around_apply(refused, None, linear, wide[:, IN:]), wide[:, IN:], linear.weight)


def test_a_product_after_an_update_has_the_new_weights():
    linear, x = layer(), torch.randn(4, IN)
    around_apply(refused, None, linear, x)
    # As SGLang's loaders write: in place, and past autograd's counter of versions.
    linear.weight.data.copy_(torch.randn(OUT, IN))
    before_update()
    assert_product(around_apply(refused, None, linear, x), x, linear.weight)


def test_weights_of_one_shape_are_told_apart():
    first, second, x = layer(), layer(), torch.randn(4, IN)
    second.weight.data.neg_()
    assert_product(around_apply(refused, None, first, x), x, first.weight)
    assert_product(around_apply(refused, None, second, x), x, second.weight)


def test_all_methods_of_sglang_that_change_weights_drop_the_copies():
    source = Path(importlib.util.find_spec("sglang").submodule_search_locations[0]).parent
    module = ast.parse(source.joinpath(*UPDATER.split(".")).with_suffix(".py").read_text())
    (updater,) = (node for node in module.body if isinstance(node, ast.ClassDef) and node.name == "WeightUpdater")
    loads = {
        method.name
        for method in updater.body
        if isinstance(method, ast.FunctionDef) and any(word in ast.unparse(method) for word in LOADS)
    }
    # Called by update_weights_from_tensor alone.
    assert loads == {*packed_linear.UPDATES, "_update_weights_from_flattened_bucket"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the hooks of a CPU")
def test_the_hooks_of_an_engine_without_a_gpu_have_them():
    from slimrl.engines.plugin import hooks

    found = {target: (kind, function) for target, kind, function in hooks.hooks()}
    for method in packed_linear.UPDATES:
        assert found[f"{UPDATER}.WeightUpdater.{method}"] == ("before", before_update)


def test_other_products_are_the_originals():
    linear, x = layer(), torch.randn(4, IN)
    assert around_apply(asked, None, linear, torch.randn(MAX_ROWS + 1, IN)) == "the original's"
    assert around_apply(asked, None, linear, torch.randn(0, IN)) == "the original's"
    assert around_apply(asked, None, linear, x[None]) == "the original's"
    assert around_apply(asked, None, layer(torch.float16), x.half()) == "the original's"
    assert around_apply(asked, None, layer(torch.bfloat16), x) == "the original's"
    assert around_apply(asked, None, layer(shape=(64, IN)), x) == "the original's"


def test_logits_are_those_of_float64_where_the_weight_is_the_embeddings():
    head, x = layer(), torch.randn(4, IN)
    head.quant_method = UnquantizedEmbeddingMethod()
    processor = SimpleNamespace(rl_on_policy_target=None, use_fp32_lm_head=True)
    assert_product(around_lm_head(refused, processor, x, head, out=None), x, head.weight)
    for options in ({"quant_method": object()}, {"apply_lora": asked}):
        other = SimpleNamespace(**{**vars(head), **options})
        assert around_lm_head(asked, processor, x, other) == "the original's"
    assert (
        around_lm_head(asked, SimpleNamespace(rl_on_policy_target="fsdp", use_fp32_lm_head=False), x, head)
        == "the original's"
    )
    assert around_lm_head(asked, processor, torch.randn(MAX_ROWS + 1, IN), head) == "the original's"


def test_logits_of_bfloat16_weights_are_the_originals_where_they_are_to_be_float32():
    head, x = layer(torch.bfloat16), torch.randn(4, IN).bfloat16()
    head.quant_method = UnquantizedEmbeddingMethod()
    processor = SimpleNamespace(rl_on_policy_target=None, use_fp32_lm_head=True)
    assert around_lm_head(asked, processor, x, head) == "the original's"
