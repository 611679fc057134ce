"""Expert load and router entropy of routing maps written by hand."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from torch import nn

from slimrl.trainer.routers import RouterStats

PADDING = torch.tensor([False, False, False, True])
"""The last token is padding, which every router below sends to expert 3 alone."""
UNEVEN = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1]], dtype=torch.bool)
"""3, 2, 1 and 0 tokens for the four experts: the busiest has 3, the mean is 1.5."""
ONE_EXPERT = torch.tensor([[1, 0, 0, 0]] * 3 + [[0, 0, 0, 1]], dtype=torch.bool)
"""3 tokens for the first expert: the mean is 0.75."""
EVEN_LOGITS = torch.tensor([[0.0] * 4] * 3 + [[9.0, 0.0, 0.0, 0.0]])
"""Every expert is as likely, but for padding."""
CERTAIN_LOGITS = torch.tensor([[100.0, 0.0, 0.0, 0.0]] * 3 + [[0.0] * 4])


class HandRouter(TopKRouter):
    """Routes as told."""

    is_mtp_layer = False

    def __init__(self, layer: int, routing_map_TE: torch.Tensor, logits_TE: torch.Tensor) -> None:
        nn.Module.__init__(self)
        self.config = SimpleNamespace(num_moe_experts=4)
        self.layer_number, self.is_mtp_layer = layer, False
        self.routing_map_TE, self.logits_TE = routing_map_TE, logits_TE

    def gating(self, hidden):
        return self.logits_TE

    def forward(self, hidden):
        return None, self.routing_map_TE


def summary_of(routers, *, tensor_rank=0, sequence_parallel=False, after=lambda stats: None):
    """What is counted of one pass in a model of three layers, the first of which has no router."""
    chunk = nn.ModuleList([nn.Linear(1, 1), *routers])
    stats = RouterStats([chunk], 3, tensor_rank, sequence_parallel)
    with stats.observe(PADDING):
        for router in routers:
            router(None)
    after(stats)
    found = stats.summary()
    if "expert_load" in found:
        found["expert_load"] = {layer: load.tolist() for layer, load in found["expert_load"].items()}
    return SimpleNamespace(**found)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, **options: None)


def test_load_is_the_busiest_expert_over_the_mean_of_its_layer_and_padding_does_not_count():
    found = summary_of([HandRouter(2, UNEVEN, EVEN_LOGITS), HandRouter(3, ONE_EXPERT, CERTAIN_LOGITS)])
    assert found.expert_load_max_over_mean == pytest.approx((3 / 1.5 + 3 / 0.75) / 2)
    # The third layer is the worse one. The second leaves out one expert, the third three.
    assert (found.expert_load_worst, found.expert_load_worst_layer, found.dead_experts) == (pytest.approx(4.0), 2, 4)
    # The first layer has no router.
    assert found.expert_load == {1: [3, 2, 1, 0], 2: [3, 0, 0, 0]}
    assert found.router_entropy == pytest.approx((math.log(4) + 0) / 2)


def test_a_pass_without_gradient_or_outside_of_an_observation_does_not_count():
    router = HandRouter(2, UNEVEN, EVEN_LOGITS)

    def more_passes(stats):
        router.routing_map_TE = ONE_EXPERT
        router(None)
        with torch.no_grad(), stats.observe(PADDING):
            router(None)

    assert summary_of([router], after=more_passes).expert_load_max_over_mean == pytest.approx(2.0)


@pytest.mark.parametrize("tensor_rank", [0, 1])
def test_a_rank_of_sequence_parallelism_takes_its_own_piece_of_the_padding(tensor_rank):
    """Each has two of the four tokens, which take two experts evenly; the second's other one is padding."""
    piece = slice(2 * tensor_rank, 2 * tensor_rank + 2)
    router = HandRouter(1, UNEVEN[piece], EVEN_LOGITS[piece])
    found = summary_of([router], tensor_rank=tensor_rank, sequence_parallel=True)
    assert found.expert_load_max_over_mean == pytest.approx(2.0)
    assert found.router_entropy == pytest.approx(math.log(4))


def test_tokens_that_all_tensor_parallel_ranks_have_count_once(monkeypatch):
    def of_the_first_rank(values, op=dist.ReduceOp.SUM):
        if values.shape != (1,):
            values[0] += torch.tensor([3.0, 2.0, 1.0, 0.0, 3 * math.log(4), 3.0])

    monkeypatch.setattr(dist, "all_reduce", of_the_first_rank)
    assert summary_of([HandRouter(1, UNEVEN, EVEN_LOGITS)], tensor_rank=1).expert_load == {0: [3, 2, 1, 0]}


def test_a_model_without_routers_has_no_load():
    assert vars(summary_of([])) == {}


def test_routers_of_extra_layers_are_left_out():
    extra = HandRouter(1, ONE_EXPERT, EVEN_LOGITS)
    extra.is_mtp_layer = True
    assert summary_of([HandRouter(2, UNEVEN, EVEN_LOGITS), extra]).expert_load_worst == pytest.approx(2.0)


def test_a_new_update_starts_from_no_counts():
    router = HandRouter(2, UNEVEN, EVEN_LOGITS)

    def again(stats):
        stats.reset()
        router.routing_map_TE, router.logits_TE = ONE_EXPERT, CERTAIN_LOGITS
        with stats.observe(PADDING):
            router(None)

    found = summary_of([router], after=again)
    assert found.expert_load_max_over_mean == pytest.approx(3 / 0.75)
    assert found.router_entropy == pytest.approx(0.0)


def test_a_stage_without_routers_takes_part_in_the_sums_of_the_others(monkeypatch):
    """Two other ranks have a router of four experts in the second layer."""
    entropy = 2.0

    def all_reduce(values, op=dist.ReduceOp.SUM):
        if values.shape == (1,):
            assert op == dist.ReduceOp.MAX
            values.fill_(4)
        else:
            assert op == dist.ReduceOp.SUM
            values[1] += torch.tensor([6.0, 2.0, 0.0, 0.0, 4 * entropy, 4.0])

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    found = summary_of([])
    assert found.expert_load_max_over_mean == pytest.approx(6 / 2)
    assert (found.expert_load_worst_layer, found.dead_experts) == (1, 2)
    assert found.router_entropy == pytest.approx(entropy)


def test_an_observation_that_fails_is_over():
    router = HandRouter(1, UNEVEN, EVEN_LOGITS)

    def failing(stats):
        with pytest.raises(KeyError), stats.observe(PADDING):
            raise KeyError
        router.routing_map_TE = ONE_EXPERT
        router(None)

    assert summary_of([router], after=failing).expert_load_max_over_mean == pytest.approx(2.0)


def test_routers_of_layers_for_multi_token_prediction_do_not_count():
    own, mtp = (HandRouter(2, routing, EVEN_LOGITS) for routing in (torch.eye(4).bool(), torch.ones(4, 4).bool()))
    mtp.is_mtp_layer = True
    assert summary_of([own, mtp]) == summary_of([own])
