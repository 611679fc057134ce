"""CUDA graphs of a colocated engine, which must release their memory."""

import pytest

from slimrl.config.rollout_rules import _sglang_violations
from slimrl.config.schema.recipe import Recipe
from slimrl.config.sglang_kernels import graph_violations


@pytest.mark.parametrize(
    ("field", "value", "instead"),
    [
        ("cuda_graph_backend_prefill", "breakable", "Use full or disabled, or leave it out."),
        ("cuda_graph_backend_decode", "breakable", "Use full or disabled, or leave it out."),
        ("disable_prefill_cuda_graph", False, "Leave it out, or set cuda_graph_backend_prefill full."),
        ("cuda_graph_config", "{}", "Use cuda_graph_backend_prefill and the other fields of their own."),
    ],
)
def test_graphs_that_cannot_be_released_are_refused(field, value, instead):
    recipe = Recipe()
    recipe.rollout.sglang = {field: value}
    key = f"rollout.sglang.{field}"
    assert not [message for found, message in _sglang_violations(recipe) if message.endswith(instead)]
    recipe.rollout.colocated = True
    (message,) = (message for found, message in _sglang_violations(recipe) if found == key)
    assert message.endswith(instead)


def test_a_recipe_may_choose_graphs_that_can_be_released():
    for fine in ({"cuda_graph_backend_prefill": "full"}, {"disable_cuda_graph": True}):
        assert not list(
            graph_violations({"disable_prefill_cuda_graph": False, "cuda_graph_backend_decode": "full", **fine})
        )
