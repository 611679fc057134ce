"""Megatron's router with given experts, against the formulas of each scoring written in float64."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from torch.utils.checkpoint import checkpoint

from slimrl.algorithms.routing import engine_experts
from slimrl.data.packing import pack
from slimrl.data.trajectory import Segment
from slimrl.trainer.routing_replay import RoutingReplay

TOKENS, HIDDEN, EXPERTS, TOPK = 12, 6, 8, 2
SCORINGS = {
    "softmax": {},
    "softmax over all": {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 1.5},
    "sigmoid in groups": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk_scaling_factor": 2.5,
    },
}
NOT_PADDING = torch.zeros(TOKENS, dtype=torch.bool)


def router_of(**settings):
    """A router of layer 1 of a model of two layers, and a replay that has it."""
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2, hidden_size=HIDDEN, num_attention_heads=1, num_moe_experts=EXPERTS, moe_router_topk=TOPK,
        moe_router_load_balancing_type="none", moe_router_dtype="fp32", use_cpu_initialization=True,
        add_bias_linear=False, **settings,
    )  # fmt: skip
    groups = ProcessGroupCollection()
    groups.tp = groups.cp = groups.tp_cp = groups.tp_dp_cp = None
    router = TopKRouter(config, pg_collection=groups)
    nn.init.normal_(router.weight)
    if router.expert_bias is not None:
        router.expert_bias.copy_(torch.linspace(-0.2, 0.2, EXPERTS))
    router.layer_number = 2
    return router, RoutingReplay([nn.ModuleList([router])], 1, 0)


def hidden_states(seed=1):
    return torch.randn(TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(seed))


def given_experts(seed=2):
    """int16 [T, 2 layers, K], different ones in each row; those of the other layer are no experts at all."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(EXPERTS, generator=generator)[:TOPK] for _ in range(TOKENS)]
    experts = torch.full((TOKENS, 2, TOPK), 99, dtype=torch.int16)
    experts[:, 1] = torch.stack(rows)
    return experts


def weights_at(router, hidden, experts_TK, weight=None):
    """float64 [T, E]: the router's weights of the given experts, 0 elsewhere."""
    config = router.config
    logits_TE = hidden[:, 0].double() @ (router.weight.double() if weight is None else weight).T
    if config.moe_router_score_function == "sigmoid":
        scores_TK = logits_TE.sigmoid().gather(1, experts_TK)
        scores_TK = scores_TK / scores_TK.sum(1, keepdim=True)
    elif config.moe_router_pre_softmax:
        scores_TK = logits_TE.softmax(1).gather(1, experts_TK)
    else:
        scores_TK = logits_TE.gather(1, experts_TK).softmax(1)
    scores_TK = scores_TK * (config.moe_router_topk_scaling_factor or 1.0)
    return torch.zeros(TOKENS, EXPERTS, dtype=torch.float64).scatter(1, experts_TK, scores_TK)


@pytest.mark.parametrize("settings", SCORINGS.values(), ids=SCORINGS)
def test_given_experts_get_the_routers_own_weights_and_pass_its_gradient(settings):
    router, replay = router_of(**settings)
    hidden, experts = hidden_states(), given_experts()
    with replay.replay(experts, NOT_PADDING):
        probs_TE, map_TE = router(hidden)
    weight = router.weight.detach().double().requires_grad_()
    expected_TE = weights_at(router, hidden, experts[:, 1].long(), weight)
    assert torch.equal(map_TE, expected_TE > 0)
    torch.testing.assert_close(probs_TE.double(), expected_TE, atol=1e-6, rtol=0)
    factors_TE = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(3))
    (probs_TE * factors_TE).sum().backward()
    (expected_TE * factors_TE).sum().backward()
    assert weight.grad.abs().max() > 0.01
    torch.testing.assert_close(router.weight.grad.double(), weight.grad, atol=1e-5, rtol=0)


@pytest.mark.parametrize("settings", SCORINGS.values(), ids=SCORINGS)
def test_the_routers_own_experts_in_any_order_give_the_same_bits(settings):
    router, replay = router_of(**settings)
    results = []
    own = None
    for _ in range(2):
        router.weight.grad = None
        with replay.replay(own, NOT_PADDING):
            probs_TE, map_TE = router(hidden_states())
        (probs_TE * torch.arange(EXPERTS)).sum().backward()
        results.append((probs_TE.detach(), map_TE, router.weight.grad))
        own = given_experts()
        own[:, 1] = map_TE.int().topk(TOPK).indices.flip(1)
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_a_row_without_experts_or_with_one_twice_takes_the_routers_own():
    router, replay = router_of()
    hidden, experts = hidden_states(), given_experts()
    _, own_TE = router(hidden)
    experts[3], experts[5, 1], experts[7, 1, 1] = -1, 4, -1
    with replay.replay(experts, NOT_PADDING):
        _, map_TE = router(hidden)
    given_TE = torch.zeros_like(map_TE).scatter(1, given_experts()[:, 1].long(), True)
    left_out = torch.zeros(TOKENS, dtype=torch.bool)
    left_out[[3, 5, 7]] = True
    assert torch.equal(map_TE, torch.where(left_out[:, None], own_TE, given_TE))


def test_recomputation_takes_the_experts_of_its_own_micro_batch():
    """Two forward passes and then their backward passes, as in a pipeline."""
    gradients = []
    for recomputed in (False, True):
        router, replay = router_of()
        replay.start()
        losses = []
        for seed in (1, 2):
            hidden = hidden_states(seed).requires_grad_()
            with replay.replay(given_experts(seed), NOT_PADDING):
                probs_TE, _ = checkpoint(router, hidden, use_reentrant=True) if recomputed else router(hidden)
            losses.append((probs_TE * torch.arange(EXPERTS)).sum())
        if recomputed:
            with pytest.raises(AssertionError, match="not recomputed"):
                replay.finish()
            replay.in_pass = True
        for loss in losses:
            loss.backward()
        replay.finish()
        gradients.append(router.weight.grad)
    assert torch.equal(*gradients)
    assert gradients[0].abs().max() > 0.01


def test_a_pass_without_gradient_is_not_to_be_repeated():
    router, replay = router_of()
    replay.start()
    with torch.no_grad(), replay.replay(given_experts(), NOT_PADDING):
        router(hidden_states())
    replay.finish()
    replay.start()
    with pytest.raises(AssertionError, match="runs again"):
        router(hidden_states())


def test_each_rank_of_sequence_parallelism_takes_its_own_piece():
    whole, (router, _) = given_experts(), router_of()
    maps = []
    for rank, hidden in enumerate(hidden_states().chunk(2)):
        replay = RoutingReplay([nn.ModuleList([router])], 2, rank)
        with replay.replay(whole, NOT_PADDING):
            maps.append(router(hidden)[1])
    expected_TE = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter(1, whole[:, 1].long(), True)
    assert torch.equal(torch.cat(maps), expected_TE)


def test_the_summary_counts_what_was_replayed_and_what_the_router_would_have_chosen(monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: None)
    router, replay = router_of()
    hidden = hidden_states()
    _, own_TE = router(hidden)
    experts = given_experts()
    experts[:, 1] = own_TE.int().topk(TOPK).indices
    # One other pair of experts, one row that was not reported, and two tokens of padding that differ.
    other_T = torch.tensor([True] + [False] * (TOKENS - 3) + [True, True])
    experts[other_T, 1] = (~own_TE).int().topk(TOPK).indices[other_T].short()
    experts[1] = -1
    padding = NOT_PADDING.clone()
    padding[-2:] = True
    replay.start()
    with replay.replay(experts, padding):
        router(hidden)
    replay.finish()
    replayed = TOKENS - 2 - 1
    assert replay.summary() == pytest.approx((replayed / (TOKENS - 2), 1 / replayed))
    replay.start()
    with replay.replay(None, padding):
        router(hidden)
    replay.finish()
    replayed_fraction, changed_fraction = replay.summary()
    assert replayed_fraction == 0.0
    assert changed_fraction is None


def test_routers_of_extra_layers_choose_for_themselves_and_nothing_outlives_the_model():
    before = list(RouterReplay.global_router_replay_instances)
    router, _ = router_of()
    extra, _ = router_of()
    extra.is_mtp_layer, extra.router_replay = True, None
    assert [layer.layer for layer in RoutingReplay([nn.ModuleList([router, extra])], 1, 0).layers] == [1]
    assert extra.router_replay is None
    assert RouterReplay.global_router_replay_instances == before


def test_experts_of_an_engine_must_be_there_and_be_the_models():
    segment = Segment.not_sampled(np.arange(6), np.ones(6, np.bool_))
    options = {"budget_tokens": 8, "alignment": 1, "data_parallel": 1}
    [[batch]] = pack([[segment]], np.zeros(1), **options)
    with pytest.raises(ValueError, match=r"rollout\.routed_experts: true"):
        engine_experts(batch, (2, TOPK, EXPERTS))
    segment.routed_experts = np.full((6, 2, TOPK), EXPERTS - 1, np.int16)
    [[batch]] = pack([[segment]], np.zeros(1), **options)
    assert engine_experts(batch, (2, TOPK, EXPERTS)) is batch.routed_experts
    with pytest.raises(ValueError, match="expert 7, and the model has 7"):
        engine_experts(batch, (2, TOPK, EXPERTS - 1))
    with pytest.raises(ValueError, match=r"shape \(2, 2\), the model has \(3, 2\)"):
        engine_experts(batch, (3, TOPK, EXPERTS))
