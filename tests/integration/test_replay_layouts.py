"""Routing replay in whole models: what is replayed is what runs, under every layout, schedule and recomputation."""

from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from trainer_cases import (
    LAYERS,
    Run,
    gspo,
    in_layouts,
    model_config,
    sequences,
    start,
    trainer_config,
)

from slimrl.config.schema.algorithm import RoutingReplay
from slimrl.data.packing import OLD_LOGPROBS, pack
from slimrl.data.training import UpdateResult
from slimrl.runtime.cluster.rank_batches import RankBatches
from slimrl.trainer import routing_replay
from slimrl.trainer.layout.parallel import destroy_parallel
from slimrl.trainer.routers import model_routers

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

EXPERTS, TOPK = 8, 2
TP2_SP = {"tensor": 2, "sequence": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
TWO_RANKS = [
    {**TP2_SP, "expert": 2, "megatron": FULL},
    {"pipeline": 2, "virtual_pipeline": 2, "megatron": FULL},
    {"context": 2},
]
TWO_RANKS_MORE = [
    {},
    {**TP2_SP, "expert_tensor": 2},
    {"expert": 2, "megatron": SELECTIVE},
    {"expert_tensor": 2},
    {"pipeline": 2},
    {"pipeline": 2, "megatron": SELECTIVE},
    {"context": 2, "megatron": FULL},
]
FOUR_RANKS = [
    {**TP2_SP, "pipeline": 2, "expert": 2, "megatron": FULL},
    {"context": 2, "pipeline": 2, "megatron": SELECTIVE},
    {"pipeline": 2, "virtual_pipeline": 2, "expert": 2, "megatron": FULL},
    {**TP2_SP, "context": 2, "expert": 4},
    {**TP2_SP, "expert": 2, "expert_tensor": 2},
]
FAMILIES = {
    "softmax": {},
    "sigmoid in groups": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_layer_freq": [0, 1, 1, 1],
    },
}


def replaying(run: Run, mode: RoutingReplay) -> RankBatches:
    pieces = run.layout.tensor if run.layout.sequence else 1
    run.runner.routing_replay = routing_replay.RoutingReplay(run.chunks, pieces, run.layout.tensor_rank)
    return RankBatches(run.runner, mode)


def routed_batches(run: Run, *, fixed: tuple[int, ...] | None = None) -> list[Any]:
    """This rank's micro-batches; each token has two random experts in each layer, and a tenth has none."""
    rng = np.random.default_rng(5)
    packed, advantages_N = sequences(0)
    for segment in packed:
        order = rng.random((len(segment), LAYERS, EXPERTS)).argsort(-1)[..., :TOPK].astype(np.int16)
        order[rng.random(len(segment)) < 0.1] = -1
        segment.routed_experts = order if fixed is None else np.broadcast_to(np.int16(fixed), order.shape)
    layout = run.layout
    return pack(
        [[segment] for segment in packed],
        advantages_N,
        budget_tokens=run.trainer.max_tokens_per_rank * layout.context,
        alignment=layout.alignment,
        data_parallel=layout.data,
        micro_batch_multiple=layout.micro_batch_multiple,
    )[layout.data_rank]


def disturb_routers(run: Run, scale: float = 0.05) -> None:
    """Change the routers' weights, alike under every layout."""
    for router in model_routers(run.chunks):
        generator = torch.Generator().manual_seed(router.layer_number)
        with torch.no_grad():
            router.weight += scale * torch.randn(router.weight.shape, generator=generator)
    run.optimizer.megatron.reload_model_params()


def one_update(held: RankBatches) -> UpdateResult:
    held.accumulate(0, gspo, 10.0, 0.7)
    return held.step()


def updates(rank, num_ranks, port, weights, layouts):
    """For each layout: two updates that replay the engine's experts, and two that replay the trainer's own from before
    its routers changed."""
    results = []
    for run in in_layouts(rank, num_ranks, port, [layout for layout in layouts for _ in RoutingReplay], weights):
        mode = list(RoutingReplay)[len(results) % 3]
        held = replaying(run, mode)
        held.put_batches([routed_batches(run)])
        held.add_logprobs(0, OLD_LOGPROBS, 0.7)
        assert [batch.replay_experts is None for batch in held.updates[0]] == [mode == "off"] * len(held.updates[0])
        disturb_routers(run)
        results.append([one_update(held) for _ in range(2)])
    return results


@pytest.fixture(scope="module")
def reference(weights):
    return run_ranks(updates, 1, weights, [{}])[0]


def assert_equal_to_one_rank(weights, reference, num_ranks, layouts):
    for rank in run_ranks(updates, num_ranks, weights, layouts, timeout_s=200):
        for number, found in enumerate(rank):
            for expected, actual in zip(reference[number % 3], found, strict=True):
                where = f"{layouts[number // 3]} {list(RoutingReplay)[number % 3].value}"
                assert actual.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5), where
                for name, value in expected.sums.items():
                    assert actual.sums[name] == pytest.approx(value, rel=1e-5, abs=1e-4), f"{where} {name}"
                for name in ("expert_load_worst", "dead_experts", "replayed_fraction", "replay_changed_fraction"):
                    given = getattr(expected, name)
                    assert getattr(actual, name) == pytest.approx(given, abs=1e-9, nan_ok=True), f"{where} {name}"


def test_each_mode_takes_other_experts(reference):
    off, train, rollout = (updates[0] for updates in reference)
    assert (off.replayed_fraction, train.replayed_fraction) == (0.0, 1.0)
    assert 0.85 < rollout.replayed_fraction < 0.95
    # Two of eight experts at random are the router's own in one of 28 cases.
    assert rollout.replay_changed_fraction == pytest.approx(27 / 28, abs=0.02)
    assert 0.01 < train.replay_changed_fraction < 0.5
    norms = sorted(result.grad_norm for result in (off, train, rollout))
    assert min(norms[1] / norms[0], norms[2] / norms[1]) > 1.0005, norms


@pytest.mark.full
def test_two_ranks_replay_as_one(weights, reference):
    assert_equal_to_one_rank(weights, reference, 2, TWO_RANKS)


@pytest.mark.full
def test_more_layouts_of_two_ranks_replay_as_one(weights, reference):
    assert_equal_to_one_rank(weights, reference, 2, TWO_RANKS_MORE)


@pytest.mark.full
def test_four_ranks_replay_as_one(weights, reference):
    assert_equal_to_one_rank(weights, reference, 4, FOUR_RANKS)


def gradients(run: Run) -> dict[str, np.ndarray]:
    return {name: p.main_grad.clone().numpy() for name, p in run.chunks[0].named_parameters()}


def closed_checks(rank, num_ranks, port, sizes):
    """Log-probs and gradients without replay; with the recorded routing replayed; with experts 2 and 5 for every token;
    and without replay where the bias forces every router to these. And whether what ran was what was given."""
    trainer = trainer_config()
    layout = start(trainer, rank, num_ranks, port)
    run = Run(trainer, layout, None, model_config(**sizes))
    run.optimizer.megatron.step_with_ready_grads = lambda: True
    batches = routed_batches(run, fixed=(2, 5))
    held = replaying(run, RoutingReplay.train)
    held.put_batches([batches])

    def measured():
        found = run.runner.compute_logprobs(batches, 0.7, routing=True)
        assert found is not None
        one_update(held)
        return np.concatenate([one.logprobs for one in found]), gradients(run), found

    plain = measured()
    held.add_logprobs(0, OLD_LOGPROBS, 0.7)
    again = measured()
    for batch in batches:
        batch.replay_experts = np.broadcast_to(np.int16((5, 2)), batch.routed_experts.shape)
    given = measured()
    ran = [one.routed_experts for one in given[2]]
    for batch in batches:
        batch.replay_experts = None
    forced = None
    for router in model_routers(run.chunks):
        if router.expert_bias is not None:
            router.expert_bias[[2, 5]] = 100.0
            forced = True
    forced = measured()[:2] if forced else None
    destroy_parallel()
    return plain[:2], again[:2], given[:2], np.concatenate(ran), forced


@pytest.mark.parametrize("sizes", FAMILIES.values(), ids=FAMILIES)
def test_replay_of_the_own_routing_changes_no_bit_and_of_other_experts_is_a_model_that_is_forced_to_them(sizes):
    plain, again, given, ran_TLK, forced = run_ranks(closed_checks, 1, sizes)[0]
    dense = sizes.get("moe_layer_freq", [1])[0] == 0
    assert np.array_equal(plain[0], again[0])
    assert all(np.array_equal(plain[1][name], again[1][name]) for name in plain[1])
    assert (ran_TLK[:, dense:] == [2, 5]).all()
    assert (ran_TLK[:, :dense] == -1).all()
    assert np.abs(plain[0] - given[0]).max() > 0.01
    routers = [name for name in given[1] if name.endswith("router.weight")]
    assert len(routers) == LAYERS - dense
    assert all(np.abs(given[1][name]).max() > 1e-6 for name in routers)
    if forced is not None:
        assert np.array_equal(forced[0], given[0])
        assert all(np.array_equal(forced[1][name], given[1][name]) for name in given[1])
