"""What a router's forward hook records: the experts of each token, and by how much they won."""

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.transformer.moe.router import TopKRouter
from torch import nn

from slimrl.trainer.routers import RoutingRecord

TOPK = 2


class Router(TopKRouter):
    """Takes logits as they come; chooses by the sigmoid and a bias where it has one, else by the logits."""

    is_mtp_layer = False

    def __init__(self, bias_E: torch.Tensor | None) -> None:
        nn.Module.__init__(self)
        self.layer_number, self.expert_bias = 2, bias_E
        self.score_function = "softmax" if bias_E is None else "sigmoid"
        self.weight = nn.Parameter(torch.zeros(1))

    def gating(self, logits_TE: torch.Tensor) -> torch.Tensor:
        return logits_TE

    def forward(self, logits_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores_TE = logits_TE if self.expert_bias is None else logits_TE.sigmoid() + self.expert_bias
        chosen_TE = torch.zeros_like(logits_TE, dtype=torch.bool).scatter(1, scores_TE.topk(TOPK).indices, True)
        return scores_TE, chosen_TE


@pytest.mark.parametrize(
    ("bias", "experts", "margins"),
    [
        (None, [{0, 1}, {1, 3}], [1.0, 2.0]),
        # sigmoid(0) = 1/2, sigmoid(2) = 0.8808, sigmoid(1) = 0.7311, sigmoid(3) = 0.9526.
        ([0.0, 0.0, 1.0, 0.0], [{0, 2}, {2, 3}], [0.8808 - 0.7311, 0.9526 - 0.8808]),
    ],
)
def test_the_margin_is_between_the_scores_that_choose(monkeypatch: pytest.MonkeyPatch, bias, experts, margins):
    monkeypatch.setattr(mpu, "get_pipeline_model_parallel_world_size", lambda: 1)
    router = Router(None if bias is None else torch.tensor(bias))
    record = RoutingRecord([nn.ModuleList([router])], num_layers=3, topk=TOPK, tensor=1)
    record.start()
    router(torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 2.0, 0.0, 3.0]]))
    ((experts_TLK, margin_TL),) = record.take([2])
    assert [set(token.tolist()) for token in experts_TLK[:, 1]] == experts
    assert margin_TL[:, 1].tolist() == pytest.approx(margins, abs=2e-4)
    # The other layers have no router.
    assert experts_TLK[:, [0, 2]].unique().tolist() == [-1]
    assert margin_TL[:, [0, 2]].max() == -torch.inf


def test_only_passes_between_start_and_take_are_recorded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mpu, "get_pipeline_model_parallel_world_size", lambda: 1)
    router = Router(None)
    record = RoutingRecord([nn.ModuleList([nn.Linear(1, 1), router])], num_layers=2, topk=TOPK, tensor=1)
    first, second = torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([[0.0, 2.0, 0.0, 3.0], [5.0, 0.0, 4.0, 0.0]])
    router(first)
    record.start()
    router(first)
    record.start()
    router(second)
    router(first)
    (experts_TLK, margin_TL), (others_TLK, _) = record.take([2, 1])
    assert [set(token.tolist()) for token in experts_TLK[:, 1]] == [{1, 3}, {0, 2}]
    assert [set(token.tolist()) for token in others_TLK[:, 1]] == [{0, 1}]
    assert margin_TL[:, 1].tolist() == [2.0, 4.0]
    assert (experts_TLK.dtype, margin_TL.dtype) == (torch.int32, torch.float32)
    router(first)
    with pytest.raises(AssertionError, match="start comes first"):
        record.take([1])


def test_a_token_that_takes_fewer_experts_has_no_others(monkeypatch: pytest.MonkeyPatch):
    """As where experts have a capacity."""
    monkeypatch.setattr(mpu, "get_pipeline_model_parallel_world_size", lambda: 1)
    router = Router(None)
    router.forward = lambda logits_TE: (logits_TE, torch.tensor([[False, True, False], [False, False, False]]))
    record = RoutingRecord([nn.ModuleList([router])], num_layers=2, topk=TOPK, tensor=1)
    record.start()
    router(torch.tensor([[1.0, 3.0, 2.5], [0.0, 1.0, 2.0]]))
    ((experts_TLK, margin_TL),) = record.take([2])
    assert experts_TLK[:, 1].tolist() == [[1, -1], [-1, -1]]
    assert margin_TL[:, 1].tolist() == [0.5, torch.inf]


def test_pieces_of_tensor_parallel_ranks_are_put_together_and_layers_of_other_stages_filled_in(
    monkeypatch: pytest.MonkeyPatch,
):
    """Two ranks have a token each; another stage has the first layer's router."""
    groups = {"get_tensor_model_parallel_group": "tensor", "get_pipeline_model_parallel_group": "pipeline"}
    for name, group in groups.items():
        monkeypatch.setattr(mpu, name, lambda group=group: group)
    monkeypatch.setattr(mpu, "get_pipeline_model_parallel_world_size", lambda: 2)

    def all_gather(parts, own, group):
        assert group == "tensor"
        parts[0].copy_(own)
        parts[1].copy_(own + 1)

    def all_reduce(values, op, group):
        assert (op, group) == (dist.ReduceOp.MAX, "pipeline")
        values[:, 0] = values[:, 0].clamp(min=7)

    monkeypatch.setattr(dist, "all_gather", all_gather)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    router = Router(None)
    record = RoutingRecord([nn.ModuleList([router])], num_layers=2, topk=TOPK, tensor=2)
    record.start()
    router(torch.tensor([[2.0, 1.0, 0.0, -1.0]]))
    ((experts_TLK, margin_TL),) = record.take([2])
    assert experts_TLK[:, 0].tolist() == [[7, 7], [7, 7]]
    assert [set(token.tolist()) for token in experts_TLK[:, 1]] == [{0, 1}, {1, 2}]
    assert margin_TL.tolist() == [[7.0, 1.0], [7.0, 2.0]]
