"""Who sends what and when by the p2p transport, in cases that can be worked out by hand."""

import random
from collections import Counter

from slimrl.data.model_weights import EngineModel, SourcePiece, TensorSpec
from slimrl.data.peer_messages import Entry, Message
from slimrl.quantization.fp8 import BlockFp8
from slimrl.resync.p2p.demand import Demand, sent_tensors
from slimrl.resync.p2p.engine_plan import EnginePlan
from slimrl.resync.p2p.rounds import MIN_ROUNDS, SMALL_BYTES, Slots, plan_rounds
from slimrl.resync.p2p.shares import Share, Shares
from slimrl.resync.transform import Quantize


def demand(tensor: int, rows: int, holders: tuple[int, ...], ranks: tuple[int, ...] = (0,)) -> Demand:
    """Rows of 4 bytes."""
    return Demand(tensor, ((0, rows), (0, 1)), 4 * rows, holders, ranks)


def test_a_rank_that_alone_holds_something_sends_less_of_what_others_hold_too():
    needed = [demand(0, 100, (0, 1)), demand(1, 60, (0,)), demand(2, 20, (1, 2)), demand(3, 40, (0, 2))]
    shares = Shares([needed])
    sent = Counter[int]()
    for share in shares.of(0):
        sent[share.source] += share.nbytes
    # 220 rows in all, of which rank 2 holds 60.
    assert sent == {0: 80 * 4, 1: 80 * 4, 2: 60 * 4}
    assert shares.sent == sent


def test_ranks_that_keep_the_same_take_turns_to_get_it_from_the_trainer():
    needed = [demand(number, 10, (0,), ranks=(0, 1, 2)) for number in range(6)] + [demand(6, 25, (0,), ranks=(0,))]
    needed += [demand(7, 10, (0,), ranks=(0, 1, 2)), demand(8, 10, (0,), ranks=(0, 1, 2))]
    assert [share.target for share in Shares([needed]).of(0)] == [0, 1, 2, 0, 1, 2, 0, 1, 2]


def test_every_rank_sends_as_much_in_each_round_though_each_holds_other_layers():
    """A large version, whose slots would hold all of it at once."""
    rows = SMALL_BYTES // 4
    specs = [TensorSpec(name=f"w{number}", shape=(rows, 1), dtype="float32") for number in range(2 * MIN_ROUNDS)]
    shares = [
        Share(number, ((0, rows), (0, 1)), 4 * rows, source=number // MIN_ROUNDS, target=0, ranks=(0,))
        for number in range(2 * MIN_ROUNDS)
    ]
    rounds = plan_rounds(shares, specs, Slots(engine=64 * SMALL_BYTES, trainer=64 * SMALL_BYTES))
    assert len(rounds) == MIN_ROUNDS
    for messages in rounds:
        assert [(message.source, message.nbytes) for message in messages] == [(0, SMALL_BYTES), (1, SMALL_BYTES)]


def test_ranks_that_send_nothing_to_an_engine_have_no_number_in_its_group():
    entry = Entry("w", "float32", ((0, 2),))
    messages = tuple(
        Message(source=source, target=target, ranks=(0, 1), entries=(entry,), nbytes=8)
        for source, target in [(1, 0), (3, 1)]
    )
    plan = EnginePlan(rounds={EngineModel.target: (messages,)}, num_ranks=2, sources=(1, 3))
    assert plan.world_size == 4
    assert [plan.member(source) for source in plan.sources] == [2, 3]
    for rounds in plan.rounds_by_rank():
        assert [message.source for message in rounds[EngineModel.target][0]] == [2, 3]
    assert [plan.is_sent_by(rank) for rank in range(4)] == [False, True, False, True]


def test_a_piece_within_a_tile_that_begins_before_it_has_no_scale():
    spec = TensorSpec(name="w", shape=(8, 4), dtype="bfloat16")
    edges = [(0, 2), (2, 3), (3, 8)]
    pieces = tuple(SourcePiece(region=(slice(*rows), slice(0, 4)), holders=(rank,)) for rank, rows in enumerate(edges))
    values, scales = sent_tensors({spec: pieces}, Quantize(BlockFp8(block=(4, 4)), {"w"}))
    assert [holders for _, holders in values.pieces] == [(0,), (1,), (2,)]
    assert scales.pieces == ((((0, 1), (0, 1)), (0,)), (((1, 2), (0, 1)), (2,)))


def test_no_rank_sends_to_more_engines_than_counted_however_rows_are_cut():
    for seed in range(200):
        draw = random.Random(seed)
        ranks = draw.randint(2, 12)
        engines = [
            [
                demand(number, draw.randint(1, 30), tuple(sorted(draw.sample(range(ranks), draw.randint(1, ranks)))))
                for number in range(draw.randint(1, 6))
            ]
            for _ in range(draw.randint(1, 9))
        ]
        shares = Shares(engines)
        served = Counter(rank for engine in range(len(engines)) for rank in {one.source for one in shares.of(engine)})
        assert max(served.values()) <= shares.most_served(), seed


def test_copies_of_a_rank_serve_their_part_of_the_engines_alone():
    shares = Shares([[demand(0, 1000, (0, 1, 2, 3))]] * 32)
    assert shares.most_served() <= 32 // 4 + 2
