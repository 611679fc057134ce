"""The parallel layout changes neither loss, nor gradient, nor what is reported: two updates against one rank's."""

import pytest
from ranks import run_ranks
from trainer_cases import run_layouts

from slimrl.config.schema.trainer import OptimizerConfig

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

TP2_SP = {"tensor": 2, "sequence": True}
UNSHARDED = OptimizerConfig(lr=1e-3, weight_decay=0.01, distributed=False)
TWO_RANKS = [
    {},
    {**TP2_SP, "expert_tensor": 2},
    {**TP2_SP, "expert": 2},
    {"pipeline": 2},
    {"pipeline": 2, "virtual_pipeline": 2},
    {"expert": 2},
    {"expert_tensor": 2},
    {"context": 2},
]
"""The first is two data-parallel ranks."""
FOUR_RANKS = [{**TP2_SP, "pipeline": 2, "expert": 2}, {"context": 2, "pipeline": 2}]
FOUR_RANKS_MORE = [
    {"pipeline": 4},
    {"pipeline": 2, "virtual_pipeline": 2, "expert": 2},
    {**TP2_SP, "context": 2, "expert": 4},
    {**TP2_SP, "expert": 2, "expert_tensor": 2},
    {"expert": 2, "expert_tensor": 2},
    {
        "expert": 2,
        "megatron": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    },
    {"expert": 2, "optimizer": UNSHARDED},
    {"megatron": {"overlap_grad_reduce": True, "overlap_param_gather": True}},
]
LOSSES = ("cross_entropy", "gspo")


@pytest.fixture(scope="module")
def reference(weights):
    cases = [({}, loss) for loss in LOSSES]
    return dict(zip(LOSSES, run_ranks(run_layouts, 1, weights, cases, 2)[0], strict=True))


def assert_equal_to_one_rank(weights, reference, num_ranks, layouts):
    cases = [(layout, loss) for layout in layouts for loss in LOSSES]
    results = run_ranks(run_layouts, num_ranks, weights, cases, 2, timeout_s=200)
    for rank_results in results:
        for (layout, loss), updates in zip(cases, rank_results, strict=True):
            for expected, actual in zip(reference[loss], updates, strict=True):
                where = f"{layout} {loss}"
                assert actual.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5), where
                count = expected.sums["tokens" if loss == "cross_entropy" else "weight"]
                assert actual.sums.keys() == expected.sums.keys()
                for name, value in expected.sums.items():
                    assert actual.sums[name] / count == pytest.approx(value / count, rel=1e-5, abs=1e-5), (
                        f"{where} {name}"
                    )
                assert actual.num_tokens == expected.num_tokens
                assert actual.expert_load_max_over_mean == pytest.approx(expected.expert_load_max_over_mean, abs=1e-9)
                assert actual.router_entropy == pytest.approx(expected.router_entropy, abs=1e-6)


def test_two_ranks_make_the_updates_of_one(weights, reference):
    assert_equal_to_one_rank(weights, reference, 2, TWO_RANKS)


@pytest.mark.full
def test_four_ranks_in_mixed_layouts_make_the_updates_of_one(weights, reference):
    assert_equal_to_one_rank(weights, reference, 4, FOUR_RANKS)


@pytest.mark.full
def test_all_mixed_layouts_of_four_ranks_make_the_updates_of_one(weights, reference):
    assert_equal_to_one_rank(weights, reference, 4, FOUR_RANKS_MORE)


def test_the_same_inputs_give_the_same_bits(weights):
    first, second = run_ranks(run_layouts, 2, weights, [({"expert": 2}, "gspo")] * 2, 2)[0]
    assert first == second
