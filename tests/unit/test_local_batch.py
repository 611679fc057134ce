"""What a rank cuts out of a micro-batch, and how the pieces of all ranks come together again."""

from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from slimrl.algorithms.cross_batch_sums import _whole_batch
from slimrl.data.packing import MicroBatch
from slimrl.trainer.local_batch import LocalBatch, gather_context, shard_context

TOKENS = 24
PLACES = {
    1: [list(range(24))],
    # Of sequences of 8 and 16 tokens: the first and the last quarter, and both in the middle.
    2: [[0, 1, 6, 7, 8, 9, 10, 11, 20, 21, 22, 23], [2, 3, 4, 5, 12, 13, 14, 15, 16, 17, 18, 19]],
}
WIDENED = ("tokens", "targets", "position_ids", "trajectory_ids")


def micro_batch() -> MicroBatch:
    """Two sequences, every field with numbers of its own."""
    tokens = np.arange(TOKENS, dtype=np.int32)
    return MicroBatch(
        tokens=tokens + 100, targets=tokens + 101, mask=tokens % 3 == 0, padding=tokens >= 20, position_ids=tokens % 8,
        cu_seqlens=np.array([0, 8, 24], np.int32), trajectory_ids=tokens // 12,
        rollout_logprobs=-tokens.astype(np.float32), trajectories=np.array([5, 3]), num_sampled=np.array([4, 2]),
        weight_versions=tokens,
        advantages=np.array([0.5, -0.5], np.float32), remote={"policy": np.array([0.25, 0.75], np.float32)},
        sequences=np.array([0, 2]),
        added={"old_logprobs": -2 * tokens.astype(np.float32)},
    )  # fmt: skip


def group(ranks: int, rank: int) -> SimpleNamespace:
    return SimpleNamespace(size=lambda: ranks, rank=lambda: rank)


@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_a_rank_has_its_tokens_of_every_field_and_all_trajectories(ranks, rank):
    batch, place = micro_batch(), PLACES[ranks][rank]
    found = shard_context(batch, group(ranks, rank))
    assert found.index_T.tolist() == place
    per_token = [field.name for field in fields(LocalBatch) if field.name.endswith("_T") and field.name != "index_T"]
    assert len(per_token) == 8
    per_token.remove("added_T")
    assert found.counted_R.tolist() == [number for number, token in enumerate(place) if token % 3 == 0]
    assert found.added_T["old_logprobs"].tolist() == [-2.0 * token for token in place]
    for name in per_token:
        assert getattr(found, name).tolist() == getattr(batch, name.removesuffix("_T"))[place].tolist(), name
    assert {getattr(found, f"{name}_T").dtype for name in WIDENED} == {torch.int64}
    assert {name: values_N.tolist() for name, values_N in found.remote_N.items()} == {"policy": [0.25, 0.75]}
    for name in ("num_sampled", "advantages"):
        assert getattr(found, f"{name}_N").tolist() == getattr(batch, name).tolist()
    assert found.total_tokens == TOKENS
    assert found.num_tokens == sum(token < 20 for token in place)
    assert (found.context_group is None) == (found.sum_over_ranks is None) == (ranks == 1)
    packed = found.packed_seq_params
    assert packed.qkv_format == "thd"
    assert packed.cu_seqlens_q.tolist() == packed.cu_seqlens_kv.tolist() == [0, 8, 24]
    assert packed.max_seqlen_q == packed.max_seqlen_kv == 16


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("ranks", [1, 2])
def test_arrays_of_a_batch_that_may_not_be_written_share_no_memory_with_its_tensors(ranks):
    """As those that Ray hands out are; torch warns of each, if it is told to warn more than once."""
    batch, warned = micro_batch(), torch.is_warn_always_enabled()
    arrays = [value for value in vars(batch).values() if isinstance(value, np.ndarray)]
    for values in (*arrays, *batch.added.values(), *batch.remote.values()):
        values.flags.writeable = False
    torch.set_warn_always(True)
    try:
        found = shard_context(batch, group(ranks, 0), mtp_layers=1)
        whole = _whole_batch(batch)
    finally:
        torch.set_warn_always(warned)
    for values in (found.advantages_N, found.tokens_T, whole.num_sampled_N):
        values.add_(1)
    assert batch.advantages.tolist() == [0.5, -0.5]
    assert batch.tokens.tolist() == [token + 100 for token in range(TOKENS)]
    assert batch.num_sampled.tolist() == [4, 2]


def test_a_sequence_that_ranks_cannot_share_is_refused():
    with pytest.raises(ValueError, match="8 tokens cannot be divided over 3"):
        shard_context(micro_batch(), group(3, 0))


def test_values_of_all_ranks_are_joined_in_the_order_of_the_micro_batch(monkeypatch):
    values_T2 = torch.arange(2 * TOKENS).reshape(TOKENS, 2).float()
    parts = [shard_context(micro_batch(), group(2, rank)) for rank in range(2)]

    def all_gather(received, own, group):
        assert group is parts[1].context_group
        for rank, part in enumerate(received):
            part.copy_(parts[rank].index_T if own.dtype == torch.int64 else values_T2[parts[rank].index_T])

    monkeypatch.setattr(dist, "all_gather", all_gather)
    joined = gather_context(values_T2[parts[1].index_T], parts[1])
    assert torch.equal(joined, values_T2)
    alone = shard_context(micro_batch(), group(1, 0))
    assert gather_context(values_T2, alone) is values_T2


def test_a_sum_over_ranks_leaves_what_is_added_as_it_was(monkeypatch):
    batch, own = shard_context(micro_batch(), group(2, 0)), torch.ones(3)

    def all_reduce(total, group):
        assert group is batch.context_group
        total += 2

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    assert batch.sum_over_ranks(own).tolist() == [3, 3, 3]
    assert own.tolist() == [1, 1, 1]


def test_a_rank_without_a_target_that_counts_names_one_token():
    batch = micro_batch()
    batch.mask[:] = False
    assert shard_context(batch, group(2, 1)).counted_R.tolist() == [0]
