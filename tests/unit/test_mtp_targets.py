"""Targets of layers for multi-token prediction, against a loop over the tokens of each sequence."""

import numpy as np

from slimrl.data.mtp_targets import count_targets, mtp_targets
from slimrl.data.packing import pack
from slimrl.data.trajectory import Segment

LAYERS = 3


def packed_segments():
    rng = np.random.default_rng(3)
    lengths = (9, 2, 3, 6)
    segments = [Segment.not_sampled(rng.integers(1, 100, n), rng.random(n) < 0.7) for n in lengths]
    (batches,) = pack(
        [[one] for one in segments], np.ones(len(segments), np.float32), budget_tokens=32, alignment=4, data_parallel=1
    )
    return segments, batches


def test_a_layer_reads_and_predicts_the_tokens_further_on_in_its_sequence():
    segments, (batch,) = packed_segments()
    tokens_DT, targets_DT, mask_DT = mtp_targets(batch, LAYERS)
    for segment, start in zip(segments, batch.cu_seqlens, strict=False):
        for k in range(1, LAYERS + 1):
            for t in range(len(segment) - 1):
                at = start + t
                read = segment.tokens[t + k] if t + k < len(segment) else 0
                predicted = segment.tokens[t + k + 1] if t + k + 1 < len(segment) else 0
                sampled = t + k + 1 < len(segment) and segment.loss_mask[t + k + 1]
                assert (tokens_DT[k - 1, at], targets_DT[k - 1, at], mask_DT[k - 1, at]) == (read, predicted, sampled)
    assert not mask_DT[:, batch.padding].any()


def test_targets_are_counted_without_shifting():
    _, batches = packed_segments()
    for batch in batches:
        assert count_targets(batch, LAYERS).tolist() == mtp_targets(batch, LAYERS)[2].sum(1).tolist()


def test_a_micro_batch_shorter_than_the_shift_has_no_targets():
    (batches,) = pack(
        [[Segment.not_sampled(np.array([1, 2]), np.array([False, True]))]],
        np.ones(1, np.float32),
        budget_tokens=4,
        alignment=1,
        data_parallel=1,
    )
    tokens_DT, _, mask_DT = mtp_targets(batches[0], LAYERS)
    assert tokens_DT.tolist() == [[2], [0], [0]]
    assert not mask_DT.any()
