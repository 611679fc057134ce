"""A trainer that gives its memory away between updates computes the same bits as one that keeps it."""

import pytest
import torch
from groups import leave_groups
from ranks import run_ranks
from trainer_cases import (
    Run,
    gradient_bytes,
    optimizer_bytes,
    packed_batches,
    start,
    trainer_config,
    weight_bytes,
)

from slimrl.config.schema.precision import Precision
from slimrl.config.schema.trainer import OptimizerConfig
from slimrl.data.training import MemoryPart
from slimrl.trainer.layout.parallel import destroy_parallel, init_model_parallel
from slimrl.trainer.offload import Offload

pytestmark = [pytest.mark.integration, pytest.mark.timeout(200)]

CASES = [(precision, distributed) for precision in Precision for distributed in (True, False)]


def updates(rank, num_ranks, port):
    """For each case without and with offloading: log-probs and sums of three updates."""
    results = []
    for number, (precision, distributed) in enumerate(case for case in CASES for _ in range(2)):
        optimizer = OptimizerConfig(lr=1e-3, weight_decay=0.01, distributed=distributed)
        trainer = trainer_config(num_ranks, expert=2, precision=precision, optimizer=optimizer)
        if number == 0:
            layout = start(trainer, rank, num_ranks, port)
        else:
            leave_groups()
            layout = init_model_parallel(trainer.parallel, timeout_s=60, seed=7)
        run = Run(trainer, layout, None)
        offload = Offload(run.chunks, run.optimizer) if number % 2 else None
        result = []
        for step in range(3):
            batches = packed_batches(step, layout, trainer.max_tokens_per_rank)
            result.append([output.logprobs for output in run.runner.compute_logprobs(batches, 0.7)])
            result.append(run.update(step))
            if offload is not None:
                assert optimizer_bytes(run) > 0
                view = next(run.chunks[0].parameters()).detach().view(-1)[:3]
                before = view.clone()
                offload.release([MemoryPart.gradients, MemoryPart.optimizer])
                assert gradient_bytes(run) == 0
                assert optimizer_bytes(run) == 0
                assert torch.equal(view, before)
                offload.release([MemoryPart.weights])
                assert weight_bytes(run) == 0
                offload.restore([MemoryPart.weights])
                assert torch.equal(view, before)
                offload.restore([MemoryPart.optimizer, MemoryPart.gradients])
        results.append(result)
    destroy_parallel()
    return results


@pytest.mark.full
def test_updates_are_bit_identical_with_and_without_offloading():
    for results in run_ranks(updates, 2, timeout_s=180):
        for case, plain, offloaded in zip(CASES, results[::2], results[1::2], strict=True):
            for step in range(3):
                for one, other in zip(plain[2 * step], offloaded[2 * step], strict=True):
                    assert one.tobytes() == other.tobytes(), case
                assert plain[2 * step + 1] == offloaded[2 * step + 1], case
            assert plain[1].grad_norm > 0
