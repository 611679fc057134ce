"""Layers for multi-token prediction learn the same under every layout, and the rest of the model as without them."""

from functools import partial

import pytest
from ranks import run_ranks
from trainer_cases import in_layouts, save_initial_weights

from slimrl.config.schema.trainer import MtpConfig, OptimizerConfig

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

MTP = {"mtp": MtpConfig(train=True, loss_weight=0.3)}
CLIPPED = OptimizerConfig(lr=1e-3, weight_decay=0.01, clip_grad=0.05, distributed=False)
"""Clips every update. Sharded, MTP layers would move the borders of shards, and norms differ in their last bits."""
TP2_SP = {"tensor": 2, "sequence": True}
TWO_RANKS = [{**TP2_SP, "expert": 2}, {"pipeline": 2}, {"context": 2}]
TWO_RANKS_MORE = [
    {},
    {**TP2_SP, "expert_tensor": 2},
    {"pipeline": 2, "virtual_pipeline": 2},
    {"expert": 2},
    {"pipeline": 2, "megatron": {"overlap_grad_reduce": True, "overlap_param_gather": True}},
    {
        "context": 2,
        "megatron": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    },
    {"pipeline": 2, "max_tokens_per_rank": 64},
]
FOUR_RANKS = [{**TP2_SP, "pipeline": 2, "expert": 2}, {"context": 2, "pipeline": 2}, {**TP2_SP, "context": 2}]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("weights") / "initial")
    run_ranks(partial(save_initial_weights, **MTP), 1, path)
    return path


def updates(rank, num_ranks, port, weights, layouts):
    """By layout (result, norm of the MTP gradient) of each of two updates."""
    return [
        [(run.update(step, "gspo"), run.optimizer.mtp_grad_norm) for step in range(2)]
        for run in in_layouts(rank, num_ranks, port, layouts, weights)
    ]


@pytest.fixture(scope="module")
def reference(weights):
    return run_ranks(updates, 1, weights, [{**MTP}])[0][0]


def assert_equal_to_one_rank(weights, reference, num_ranks, layouts):
    results = run_ranks(updates, num_ranks, weights, [{**layout, **MTP} for layout in layouts], timeout_s=200)
    for of_rank in results:
        for layout, actual in zip(layouts, of_rank, strict=True):
            for (expected, expected_norm), (result, norm) in zip(reference, actual, strict=True):
                assert result.sums["mtp_loss"] == pytest.approx(expected.sums["mtp_loss"], abs=1e-5), layout
                assert norm == pytest.approx(expected_norm, rel=1e-5), layout
                assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5), layout


@pytest.mark.full
def test_two_ranks_train_mtp_layers_as_one(weights, reference):
    assert_equal_to_one_rank(weights, reference, 2, TWO_RANKS)


@pytest.mark.full
@pytest.mark.parametrize(("num_ranks", "layouts"), [(2, TWO_RANKS_MORE), (4, FOUR_RANKS)])
def test_every_layout_trains_mtp_layers_as_one_rank(weights, reference, num_ranks, layouts):
    assert_equal_to_one_rank(weights, reference, num_ranks, layouts)


def weights_after_updates(rank, num_ranks, port, weights, layouts):
    """By layout (gradient norms, router metrics, weights) after two updates with GSPO."""
    found = []
    for run in in_layouts(rank, num_ranks, port, layouts, weights):
        results = [run.update(step, "gspo") for step in range(2)]
        facts = [(r.grad_norm, r.sums["loss"], r.expert_load_max_over_mean, r.router_entropy) for r in results]
        tensors = {
            name: parameter.detach().clone().numpy()
            for number, chunk in enumerate(run.chunks)
            for name, parameter in ((f"{number}.{name}", p) for name, p in chunk.named_parameters())
        }
        found.append((facts, tensors))
    return found


def test_the_rest_of_the_model_learns_bit_for_bit_as_without_mtp_layers(weights):
    plain = {"optimizer": CLIPPED}
    layouts = [plain, {**plain, **MTP}, {**plain, "pipeline": 2}, {**plain, "pipeline": 2, **MTP}]
    for of_rank in run_ranks(weights_after_updates, 2, weights, layouts, timeout_s=120):
        for (facts, without), (facts_with, with_mtp) in (of_rank[:2], of_rank[2:]):
            assert facts == facts_with
            for name, tensor in without.items():
                assert (tensor == with_mtp[name]).all(), name
