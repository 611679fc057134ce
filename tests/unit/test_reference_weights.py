"""The reference's copies of a model's weights, those that are no parameters included."""

from types import SimpleNamespace

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import nn

from slimrl.trainer.reference import ReferenceWeights


class BiasedRouter(TopKRouter):
    """A router with a bias of experts, and one without."""

    def __init__(self, enabled: bool) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.arange(6.0).reshape(3, 2))
        self.enable_expert_bias = enabled
        self.register_buffer("expert_bias", torch.tensor([0.5, -0.5, 0.25]) if enabled else None)


def test_the_reference_has_the_bias_of_experts_that_the_run_started_with():
    chunk = nn.ModuleList([BiasedRouter(True), BiasedRouter(False)])
    wrapped = SimpleNamespace(
        parameters=chunk.parameters, modules=chunk.modules, buffers=[], expert_parallel_buffers=[]
    )  # fmt: skip
    first = {name: value.clone() for name, value in chunk.state_dict().items()}
    reference = ReferenceWeights([wrapped])
    with torch.no_grad():
        for value in chunk.state_dict().values():
            value.mul_(3).add_(1)
    learned = {name: value.clone() for name, value in chunk.state_dict().items()}
    assert set(first) == {"0.weight", "0.expert_bias", "1.weight"}
    for _ in range(2):
        with reference.swapped_in():
            assert same(chunk.state_dict(), first)
        assert same(chunk.state_dict(), learned)


def same(found, expected) -> bool:
    return all(torch.equal(value, expected[name]) for name, value in found.items())
