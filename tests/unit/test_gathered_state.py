"""The pieces in which a checkpoint's optimizer states reach one rank, against the whole shards side by side."""

from types import SimpleNamespace

import pytest
import torch

from megatron_patches import checkpointing

KEYS = ("param", "exp_avg", "exp_avg_sq")


def make_rank(rank: int, ranks: int, local: int, unpadded: int, whole: dict[str, torch.Tensor]):
    """As a DistributedOptimizer of a buffer with one bucket: parameters of 5 elements, some across ranks' borders."""
    begin, end = rank * local, min((rank + 1) * local, unpadded)
    places, values = {}, {}
    for start in range(0, unpadded, 5):
        low, high = max(start, begin), min(start + 5, end)
        if low < high:
            places[start] = {"gbuf_local": SimpleNamespace(start=low - begin, end=high - begin)}
            values[start] = {key: whole[key][low:high] for key in KEYS}
    bucket = SimpleNamespace(grad_data=torch.empty(ranks * local), numel_unpadded=unpadded)
    return SimpleNamespace(
        data_parallel_group_gloo=SimpleNamespace(rank=lambda: rank, size=lambda: ranks),
        optimizer_state_keys=KEYS[1:],
        buffers=[SimpleNamespace(numel_unpadded=unpadded, buckets=[bucket])],
        gbuf_ranges=[{"dtype": [{"param_map": places}]}],
        _get_main_param_and_optimizer_states=values.__getitem__,
    )


@pytest.mark.parametrize(("ranks", "local", "unpadded"), [(1, 7, 7), (2, 8, 13), (3, 5, 11), (4, 6, 12)])
@pytest.mark.parametrize("piece", [1, 4, 7, 1000])
def test_the_first_rank_has_the_shards_in_order_without_padding(monkeypatch, ranks, local, unpadded, piece):
    whole = {key: torch.randn(unpadded) for key in KEYS}
    optimizers = [make_rank(rank, ranks, local, unpadded, whole) for rank in range(ranks)]
    sent = []
    monkeypatch.setattr(checkpointing, "PIECE_ELEMENTS", piece)
    monkeypatch.setattr(checkpointing.dist, "get_global_rank", lambda group, rank: 0)
    monkeypatch.setattr(checkpointing.dist, "gather", lambda piece, received, first, group: sent.append(piece.clone()))
    for optimizer in reversed(optimizers[1:]):
        assert checkpointing._gathered_state(optimizer) is None
    of_rank = [sent[i * len(sent) // max(1, ranks - 1) :][: len(sent) // max(1, ranks - 1)] for i in range(ranks - 1)]
    of_rank.reverse()
    largest, call = [], iter(range(10**6))

    def gather(piece, received, first, group):
        number = next(call)
        for part, other in zip(received, [piece, *(pieces[number] for pieces in of_rank)], strict=True):
            part.copy_(other)
        largest.append(sum(part.numel() for part in received))

    monkeypatch.setattr(checkpointing.dist, "gather", gather)
    found = checkpointing._gathered_state(optimizers[0])
    assert found["buckets_coalesced"] is True
    for key in KEYS:
        assert torch.equal(found[0]["dtype"][key], whole[key])
    assert found[0]["dtype"]["numel_unpadded"] == unpadded
    assert max(largest) <= max(piece, ranks)
