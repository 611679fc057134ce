"""What a router's forward hook records: the experts of each token, and by how much they won."""

import pytest
import torch
from megatron.core import parallel_state as mpu
from megatron.core.transformer.moe.router import TopKRouter
from torch import nn

from slimrl.trainer.routing_record import RoutingRecord

TOPK = 2


class Router(TopKRouter):
    """Takes logits as they come; chooses by the sigmoid and a bias where it has one, else by the logits."""

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
