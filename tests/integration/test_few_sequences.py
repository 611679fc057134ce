"""Fewer sequences than micro-batches: those of padding alone change nothing, and no rank stays behind.

One sequence on one rank is the reference, whose gradient is compared with autograd's in test_update_scale.
"""

import numpy as np
import pytest
from ranks import run_ranks
from trainer_cases import in_layouts, packed_batches

from slimrl.algorithms.objective import loss_function
from slimrl.config.schema.algorithm import AlgorithmConfig

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

OBJECTIVES = tuple(loss_function(name, AlgorithmConfig(clip_low=0.9, clip_high=5.0)) for name in ("policy", "sft"))


def one_sequence(rank, num_ranks, port, weights, layouts):
    """For each layout: tokens of this rank's micro-batches, sampled log-probs, an update of each objective."""
    results = []
    for run in in_layouts(rank, num_ranks, port, layouts, weights):
        batches = packed_batches(0, run.layout, run.trainer.max_tokens_per_rank, count=1)
        outputs = run.runner.compute_logprobs(batches, 0.7, routing=True)
        outputs = (outputs if run.layout.is_output_rank else None) or []
        sampled = [o.logprobs[b.mask] for b, o in zip(batches, outputs, strict=bool(outputs))]
        for batch in batches:
            # Away from the current policy, so that the ratio leaves 1.
            batch.added["old_logprobs"] = batch.rollout_logprobs - 0.01 * batch.position_ids.astype(np.float32)
        updates = [
            run.runner.train_update(batches, objective, denominator=3.0, temperature=0.7) for objective in OBJECTIVES
        ]
        results.append(([batch.num_tokens for batch in batches], sampled, updates))
    return results


@pytest.mark.parametrize(
    ("num_ranks", "layouts", "num_padding"),
    [
        (2, [{}, {"expert": 2}, {"pipeline": 2, "virtual_pipeline": 2}], [1, 1, 2]),
        (4, [{"context": 2}, {"tensor": 2, "sequence": True, "expert": 2}], [2, 2]),
    ],
)
def test_one_sequence_on_several_ranks_makes_the_update_of_one_rank(weights, num_ranks, layouts, num_padding):
    [[(_, (expected_logprobs,), expected_updates)]] = run_ranks(one_sequence, 1, weights, [{}])
    assert all(update.grad_norm > 0 for update in expected_updates)
    ranks = run_ranks(one_sequence, num_ranks, weights, layouts, timeout_s=200)
    for number, layout in enumerate(layouts):
        here = [rank[number] for rank in ranks]
        assert sum(tokens.count(0) for tokens, _, _ in here) == num_padding[number], layout
        reported = [logprobs for _, sampled, _ in here for logprobs in sampled if len(logprobs)]
        (logprobs,) = reported
        np.testing.assert_allclose(logprobs, expected_logprobs, atol=5e-6, err_msg=f"{layout}")
        for _, _, updates in here:
            for update, expected in zip(updates, expected_updates, strict=True):
                where = f"{layout} {expected}"
                assert update.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5), where
                assert update.sums == pytest.approx(expected.sums, rel=1e-5), where
                assert (update.skipped, update.num_tokens) == (False, expected.num_tokens), where
                assert update.expert_load_max_over_mean == pytest.approx(expected.expert_load_max_over_mean), where
                assert update.router_entropy == pytest.approx(expected.router_entropy, abs=1e-6), where
