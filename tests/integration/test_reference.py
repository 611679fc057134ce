"""The reference's weights take the model's place for a pass, and leave it as it was, bit by bit."""

import numpy as np
import pytest
from ranks import run_ranks
from trainer_cases import in_layouts, packed_batches

from slimrl.data.packing import REFERENCE_LOGPROBS
from slimrl.data.training import MemoryPart
from slimrl.runtime.cluster.rank_batches import RankBatches
from slimrl.trainer import reference
from slimrl.trainer.offload import Offload
from slimrl.trainer.reference import ReferenceWeights

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

LAYOUTS = [{}, {"tensor": 2, "sequence": True, "expert": 2}, {"pipeline": 2, "virtual_pipeline": 2}]


def log_probs_of_the_reference(rank, num_ranks, port, weights):
    """For each layout: log-probs before an update, after it, of the reference then, and after the reference's pass."""
    reference.PIECE_BYTES = 1000
    return [of_one(run) for run in in_layouts(rank, num_ranks, port, LAYOUTS, weights)]


def of_one(run):
    held = RankBatches(run.runner)
    held.reference = ReferenceWeights(run.chunks).swapped_in
    batches = packed_batches(0, run.layout, run.trainer.max_tokens_per_rank)
    held.put_batches([batches])
    offload = Offload(run.chunks, run.optimizer)

    def now():
        results = run.runner.compute_logprobs(batches, 0.7)
        return None if results is None else [result.logprobs for result in results]

    before = now()
    run.update(0)
    after = now()
    # As between two steps of a run that shares its devices.
    offload.release([MemoryPart.weights])
    offload.restore([MemoryPart.weights])
    assert held.add_logprobs(0, REFERENCE_LOGPROBS, 0.7) is None, "nobody compares them with the engine's"
    of_reference = None if before is None else [batch.added[REFERENCE_LOGPROBS] for batch in batches]
    again = now()
    return before, after, of_reference, again


def test_a_pass_of_the_reference_has_the_first_weights_and_changes_nothing(weights):
    for of_rank in run_ranks(log_probs_of_the_reference, 2, weights, timeout_s=200):
        for layout, (before, after, of_reference, again) in zip(LAYOUTS, of_rank, strict=True):
            assert (before is None) == (of_reference is None)
            for first, second, kept, third in zip(
                before or [], after or [], of_reference or [], again or [], strict=True
            ):
                np.testing.assert_array_equal(kept, first, err_msg=f"{layout}")
                np.testing.assert_array_equal(third, second, err_msg=f"{layout}")
                assert not np.array_equal(first, second)
