"""Logits of the tokens that count alone: the gradients and log-probs of all tokens' logits, under every layout."""

import numpy as np
import pytest
import torch
from ranks import run_ranks
from trainer_cases import in_layouts, packed_batches, save_initial_weights

from slimrl.algorithms.objective import loss_function
from slimrl.config.schema.algorithm import AlgorithmConfig
from slimrl.trainer.build import unwrap

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

LAYOUTS = [
    {"tensor": 2, "sequence": True, "expert": 2},
    {"context": 2},
    {"pipeline": 2},
    {"pipeline": 2, "virtual_pipeline": 2},
]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("output_rows") / "weights")
    run_ranks(save_initial_weights, 1, path)
    return path


def an_update(run, loss):
    """Gradients of an update, its log-probs and entropies, and the rows that the output layer multiplied."""
    rows = []
    model = unwrap(run.chunks[-1])
    hooks = (
        [model.output_layer.register_forward_hook(lambda layer, given, output: rows.append(len(output[0])))]
        if run.layout.is_last_stage
        else []
    )
    batches = packed_batches(0, run.layout, run.trainer.max_tokens_per_rank)
    found = run.runner.accumulate(batches, loss, denominator=100.0, temperature=0.7, logprobs=True)
    for hook in hooks:
        hook.remove()
    buffers = [buffer for chunk in run.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    gradients = torch.cat([buffer.grad_data.double() for buffer in buffers]).numpy()
    masks = [batch.mask for batch in batches]
    values = [np.stack([output.logprobs, output.entropy]) for output in found or []]
    return gradients, masks, values, rows


def with_and_without(rank, num_ranks, port, weights, layouts):
    settings = AlgorithmConfig(clip_low=0.9, clip_high=5.0, entropy_coef=0.1)

    def loss(logprobs_T, entropy_T, batch):
        batch.added_T["old_logprobs"] = batch.rollout_logprobs_T
        return loss_function("policy", settings)(logprobs_T, entropy_T, batch)

    results = []
    for run in in_layouts(rank, num_ranks, port, layouts, weights):
        chosen = an_update(run, loss)
        run.runner.output_layer = None
        results.append((chosen, an_update(run, loss)))
    return results


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_rows_that_count_have_the_gradient_and_log_probs_of_all(weights, num_ranks):
    layouts = [{}] if num_ranks == 1 else LAYOUTS
    for of_rank in run_ranks(with_and_without, num_ranks, weights, layouts, timeout_s=200):
        for layout, (chosen, all_rows) in zip(layouts, of_rank, strict=True):
            gradients, masks, values, rows = chosen
            expected, _, all_values, more = all_rows
            scale = abs(expected).max()
            assert scale > 0
            np.testing.assert_allclose(gradients, expected, rtol=0, atol=2e-6 * scale, err_msg=str(layout))
            for found, wanted, mask in zip(values, all_values, masks, strict=bool(values)):
                np.testing.assert_allclose(found, np.where(mask, wanted, 0), atol=5e-6, err_msg=str(layout))
            assert sum(rows) < 0.8 * sum(more) or not rows
            if layout.get("context", 1) == 1:
                assert sum(rows) == (sum(map(np.sum, masks)) if rows else 0)
