"""Plans of the p2p transport, carried out byte by byte on small tensors by a simulation that knows nothing of them."""

import math
import random
from collections import Counter
from itertools import product

import pytest
import torch

from slimrl.data.boxes import Box, elements, slices_of
from slimrl.data.model_weights import EngineModel, TensorSpec
from slimrl.resync.p2p.demand import Demand, SentTensor, demands, tiles_of
from slimrl.resync.p2p.engine_plan import EnginePlans, chains
from slimrl.resync.p2p.shares import Shares, level

RANDOM_CASES = 60


def parts(size: int, count: int) -> list[tuple[int, int]]:
    """Equal parts of a dimension; those behind its end are empty."""
    step = -(-size // count)
    return [(min(size, i * step), min(size, (i + 1) * step)) for i in range(count)]


def trainer_pieces(rng: random.Random, shape: tuple[int, ...], num_ranks: int):
    """Regions and their holders: sharded along some dimension, each shard on some ranks."""
    count = rng.choice([n for n in range(1, num_ranks + 1) if num_ranks % n == 0])
    dim = rng.randrange(len(shape))
    ranks = list(range(num_ranks))
    rng.shuffle(ranks)
    copies = num_ranks // count
    result = []
    for index, edges in enumerate(parts(shape[dim], count)):
        box = tuple(edges if d == dim else (0, size) for d, size in enumerate(shape))
        holders = tuple(sorted(rng.sample(ranks[index * copies : (index + 1) * copies], rng.randint(1, copies))))
        if elements(box):
            result.append((box, holders))
    return tuple(result)


def engine_kept(rng: random.Random, tensors: list[SentTensor], num_ranks: int) -> list[dict[str, list[Box]]]:
    """What each rank of an engine keeps: shards, of which neighbours may keep the same, or the whole."""
    kept: list[dict[str, list[Box]]] = [{} for _ in range(num_ranks)]
    for tensor in tensors:
        shape = tensor.spec.shape
        count = rng.choice([n for n in range(1, num_ranks + 1) if num_ranks % n == 0])
        dim = rng.randrange(len(shape))
        shards = parts(shape[dim], count)
        for rank in range(num_ranks):
            edges = shards[rank * count // num_ranks]
            box = tuple(edges if d == dim else (0, size) for d, size in enumerate(shape))
            if elements(box):
                kept[rank][tensor.spec.name] = [box]
    return kept


def simulate(plans: EnginePlans, tensors, kept_of, per_node: int = 2):
    """Carry out all rounds.

    Returns:
        (bytes sent by each trainer rank, bytes received by each rank of each engine, by engine).
    """
    held = {t.spec.name: t.pieces for t in tensors}
    truth = {
        t.spec.name: torch.arange(1, math.prod(t.spec.shape) + 1, dtype=torch.float32).view(t.spec.shape)
        for t in tensors
    }
    sent: Counter[int] = Counter()
    received = []
    for index in range(len(plans.feeders)):
        plan = plans.of(index)
        memories = [
            {name: [torch.zeros([b - a for a, b in box]) for box in boxes] for name, boxes in kept.items()}
            for kept in kept_of[index]
        ]
        got: Counter[int] = Counter()
        for messages in plan.rounds[EngineModel.target]:
            for message in messages:
                assert message.target in message.ranks
                assert message.nbytes == sum(4 * elements(entry.box) for entry in message.entries)
                has = {message.target}
                for step in (1, 2):
                    before = set(has)
                    for when, source, target in message.hops(per_node):
                        if when == step:
                            assert source in before
                            assert target not in has
                            assert step == 1 or source // per_node == target // per_node
                            has.add(target)
                assert has == set(message.ranks)
                if plan.feeder is None:
                    sent[message.source] += message.nbytes
                for entry in message.entries:
                    if plan.feeder is None:
                        assert any(
                            message.source in holders and inside(entry.box, box) for box, holders in held[entry.name]
                        )
                    value = truth[entry.name][tuple(slice(*edge) for edge in entry.box)]
                    for rank in message.ranks:
                        got[rank] += value.numel() * 4
                        place(memories[rank][entry.name], kept_of[index][rank][entry.name], entry.box, value)
        for rank, kept in enumerate(kept_of[index]):
            for name, boxes in kept.items():
                for memory, box in zip(memories[rank][name], boxes, strict=True):
                    # Written once: what comes twice is added up.
                    assert torch.equal(memory, truth[name][tuple(slice(*edge) for edge in box)]), (index, rank, name)
        received.append(got)
    return sent, received


def inside(box: Box, outer: Box) -> bool:
    return all(a <= c and d <= b for (a, b), (c, d) in zip(outer, box, strict=True))


def place(memories, boxes, box, value) -> None:
    (index,) = [i for i, outer in enumerate(boxes) if inside(box, outer)]
    memories[index][slices_of(box, boxes[index])] += value


def random_case(seed: int):
    rng = random.Random(seed)
    num_ranks = rng.choice([1, 2, 3, 4, 8])
    tensors = []
    for number in range(rng.randint(1, 12)):
        shape = tuple(rng.randint(1, 40) for _ in range(rng.randint(1, 3)))
        spec = TensorSpec(name=f"t{number}", shape=shape, dtype="float32")
        tensors.append(SentTensor(spec, spec, trainer_pieces(rng, shape, num_ranks)))
    kinds = [engine_kept(rng, tensors, rng.choice([1, 2, 4])) for _ in range(rng.randint(1, 2))]
    models = [{EngineModel.target: kept} for kept in kinds]
    engines = [rng.choice(models) for _ in range(rng.randint(1, 5))]
    row = max(4 * math.prod(t.spec.shape[1:]) for t in tensors)
    bucket_bytes = 2 * len(engines) * row * rng.choice([1, 3, 1000])
    return num_ranks, tensors, engines, bucket_bytes


@pytest.mark.parametrize("seed", range(RANDOM_CASES))
def test_every_rank_gets_each_byte_that_it_keeps_exactly_once_from_a_rank_that_holds_it(seed):
    num_ranks, tensors, engines, bucket_bytes = random_case(seed)
    plans = EnginePlans(tensors, engines, num_ranks=num_ranks, bucket_bytes=bucket_bytes)
    kept_of = [models[EngineModel.target] for models in engines]
    _, received = simulate(plans, tensors, kept_of)
    for got, kept in zip(received, kept_of, strict=True):
        for rank, boxes in enumerate(kept):
            assert got[rank] == sum(4 * elements(box) for each in boxes.values() for box in each)


@pytest.mark.parametrize("seed", range(RANDOM_CASES))
def test_no_rank_holds_more_than_its_slot_in_a_round(seed):
    num_ranks, tensors, engines, bucket_bytes = random_case(seed)
    plans = EnginePlans(tensors, engines, num_ranks=num_ranks, bucket_bytes=bucket_bytes)
    in_slots: Counter[int] = Counter()
    for index in range(len(plans.feeders)):
        plan = plans.of(index)
        most: Counter[int] = Counter()
        for messages in plan.rounds[EngineModel.target]:
            sends, receives = Counter(), Counter()
            for message in messages:
                sends[message.source] += message.nbytes
                receives.update(dict.fromkeys(message.ranks, message.nbytes))
            assert max(receives.values()) <= bucket_bytes // 2
            most |= sends
        if plan.feeder is None:
            in_slots.update(most)
    assert max(in_slots.values()) <= bucket_bytes // 2


@pytest.mark.parametrize(("copies", "num_engines"), list(product((1, 2, 4), (1, 2, 3, 4))))
def test_ranks_that_hold_copies_share_the_work_evenly_and_all_send_in_every_round(copies, num_engines):
    """Eight ranks; each of 8 / copies groups of them holds some tensors, and all hold one more."""
    groups = 8 // copies
    tensors = []
    for number in range(64):
        spec = TensorSpec(name=f"expert{number}", shape=(64, 32), dtype="float32")
        group = number % groups
        holders = tuple(range(group * copies, (group + 1) * copies))
        tensors.append(SentTensor(spec, spec, ((((0, 64), (0, 32)), holders),)))
    spec = TensorSpec(name="dense", shape=(128, 32), dtype="float32")
    tensors.append(SentTensor(spec, spec, ((((0, 128), (0, 32)), tuple(range(8))),)))
    kept = [{t.spec.name: [tuple((0, size) for size in t.spec.shape)] for t in tensors}]
    plans = EnginePlans(
        tensors, [{EngineModel.target: kept}] * num_engines, num_ranks=8, bucket_bytes=16 * num_engines * 64 * 32 * 4
    )
    sent, _ = simulate(plans, tensors, [kept] * num_engines)
    share = sum(sent.values()) / 8
    assert all(abs(sent[rank] - share) <= 0.02 * share for rank in range(8))
    rounds = plans.of(0).rounds[EngineModel.target]
    assert len(rounds) > 2
    if copies == num_engines == 1:
        assert all(len({message.source for message in messages}) == 8 for messages in rounds)


def test_engines_that_are_copies_are_served_by_different_holders():
    spec = TensorSpec(name="w", shape=(64, 4), dtype="float32")
    tensor = SentTensor(spec, spec, ((((0, 64), (0, 4)), (0, 1, 2, 3)),))
    kept = [{"w": [((0, 64), (0, 4))]}]
    plans = EnginePlans([tensor], [{EngineModel.target: kept}] * 4, num_ranks=4, bucket_bytes=10**6)
    assert [plans.of(index).sources for index in range(4)] == [(0,), (1,), (2,), (3,)]


def test_engines_of_more_ranks_than_the_trainer_feed_each_other():
    spec = TensorSpec(name="w", shape=(64, 4), dtype="float32")
    tensor = SentTensor(spec, spec, ((((0, 64), (0, 4)), (0, 1)),))
    alike = {EngineModel.target: [{"w": [((0, 32), (0, 4))]}, {"w": [((32, 64), (0, 4))]}]}
    other = {EngineModel.target: [{"w": [((0, 64), (0, 4))]}, {"w": [((0, 64), (0, 4))]}]}
    engines = [alike, other, alike, alike, alike]
    # Ten ranks of engines for two of the trainer: chains of at most five.
    assert chains(engines, 2) == [None, None, 0, 2, 3]
    assert chains(engines, 5) == [None, None, 0, None, 3]
    assert chains(engines, 10) == [None] * 5
    plans = EnginePlans([tensor], engines, num_ranks=2, bucket_bytes=10**6)
    sent, _ = simulate(plans, [tensor], [models[EngineModel.target] for models in engines])
    assert sum(sent.values()) == 2 * 64 * 4 * 4


def test_a_tile_belongs_to_the_piece_with_its_first_element():
    shape, block = (300, 200), (128, 128)
    boxes = [((start, stop), columns) for start, stop in ((0, 100), (100, 140), (140, 300))
             for columns in ((0, 90), (90, 200))]  # fmt: skip
    owned = Counter()
    for box in boxes:
        rows, columns = tiles_of(box, block)
        owned.update(product(range(*rows), range(*columns)))
    assert owned == Counter(product(range(3), range(2)))
    assert sum(elements(tiles_of(box, block)) for box in boxes) == math.prod(-(-s // b) for s, b in
                                                                           zip(shape, block, strict=True))  # fmt: skip


def test_a_tensor_that_no_rank_keeps_is_sent_to_none():
    spec = TensorSpec(name="w", shape=(4,), dtype="float32")
    assert demands([SentTensor(spec, spec, ((((0, 4),), (0,)),))], [{"v": [((0, 4),)]}], mtp=False) == []


def test_what_two_regions_of_a_rank_have_in_common_with_a_piece_is_sent_once():
    spec = TensorSpec(name="w", shape=(4,), dtype="float32")
    held = ((((0, 2),), (0,)), (((2, 4),), (1,)))
    kept = [{"w": [((0, 4),), ((2, 4),)]}, {"w": [((2, 4),)]}]
    found = demands([SentTensor(spec, spec, held)], kept, mtp=False)
    assert found == [Demand(0, ((0, 2),), 8, (0,), (0,)), Demand(0, ((2, 4),), 8, (1,), (0, 1))]


def test_a_row_that_fits_into_no_slot_is_refused_with_the_key():
    spec = TensorSpec(name="w", shape=(4, 100), dtype="float32")
    tensor = SentTensor(spec, spec, ((((0, 4), (0, 100)), (0,)),))
    plans = EnginePlans([tensor], [{EngineModel.target: [{"w": [((0, 4), (0, 100))]}]}], num_ranks=1, bucket_bytes=790)
    with pytest.raises(ValueError, match=r"resync.bucket_bytes: one row of w has 400 bytes"):
        plans.of(0)


@pytest.mark.parametrize(
    ("nbytes", "loads", "expected"),
    [(10, [0], [10]), (10, [0, 0], [5, 5]), (11, [0, 0], [6, 5]), (4, [10, 0, 3], [0, 4, 0]),
     (9, [10, 0, 3], [0, 6, 3]), (0, [1, 2], [0, 0]), (100, [10, 0, 3], [27, 38, 35])],
)  # fmt: skip
def test_the_lowest_loads_are_brought_to_one_level(nbytes, loads, expected):
    assert sum(expected) == nbytes
    quotas = level(nbytes, loads)
    assert sum(quotas) == nbytes
    after = [load + quota for load, quota in zip(loads, quotas, strict=True)]
    raised = [a for a, quota in zip(after, quotas, strict=True) if quota]
    assert not raised or max(raised) - min(raised) <= 1
    assert sorted(quotas) == sorted(expected)


def test_a_share_is_never_larger_than_its_demand_and_shares_of_a_demand_fill_it():
    rng = random.Random(0)
    for _ in range(200):
        num_ranks, tensors, engines, _ = random_case(rng.randrange(10**6))
        kept = [models[EngineModel.target] for models in engines]
        needed = [demands(tensors, each, mtp=False) for each in kept]
        shares = Shares(needed)
        for index, each in enumerate(needed):
            assert sum(s.nbytes for s in shares.of(index)) == sum(d.nbytes for d in each)
            for share in shares.of(index):
                assert share.nbytes == 4 * elements(share.box) > 0
                assert 0 <= share.source < num_ranks
