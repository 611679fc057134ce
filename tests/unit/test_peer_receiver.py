"""Trainer ranks send versions to the ranks of engines on two nodes, over real groups within this process."""

import base64
import pickle
import threading
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch
from engine_ranks import OnlyRank
from peer_world import Parameter, PeerEngine, World, all_at_once

from slimrl import device
from slimrl.data.boxes import elements
from slimrl.data.model_weights import EngineModel, GroupSpec, TensorSpec
from slimrl.data.peer_messages import ALIGNMENT
from slimrl.engines.plugin import kept_tensors, peer_receiver
from slimrl.engines.plugin.peer_receiver import (
    FEED_FRACTION,
    WAIT_FRACTION,
    PeerReceiver,
    parse_rounds,
    plain_rounds,
)
from slimrl.engines.plugin.weight_updates import join_payload, leave_group, receive_payload, update
from slimrl.resync.p2p.engine_plan import EnginePlans
from slimrl.resync.p2p.peer_group import GroupError, Move, PeerGroup, serve_store

pytestmark = pytest.mark.skipif(device.device_type() == "cuda", reason="the groups here are of host memory")

RANKS = 4
FLOAT, HALF = torch.float32, torch.bfloat16
ITEM_BYTES = {"float32": 4, "bfloat16": 2}


def spec_of(name, shape, dtype="float32", mtp=False):
    return TensorSpec(name=name, shape=shape, dtype=dtype, mtp=mtp)


PIECES = {
    spec_of("rows", (16, 6)): [(((0, 8), (0, 6)), (0,)), (((8, 16), (0, 6)), (1,))],
    spec_of("replicated", (10, 3), "bfloat16"): [(((0, 10), (0, 3)), (0, 1))],
    spec_of("columns", (5, 12)): [(((0, 5), (0, 6)), (0,)), (((0, 5), (6, 12)), (1,))],
    spec_of("scalar", ()): [((), (1,))],
    spec_of("halves", (9,), "bfloat16"): [(((0, 9),), (0,))],
    spec_of("padded", (6, 5)): [(((0, 6), (0, 5)), (0, 1))],
    spec_of("twice", (8, 2)): [(((0, 4), (0, 2)), (0,)), (((4, 8), (0, 2)), (1,))],
}
"""What two trainer ranks hold"""


def four_ranks(rank):
    """What a rank of the engine keeps."""
    node = rank // 2
    return {
        "rows": [Parameter(((4 * rank, 4 * rank + 4), (0, 6)), FLOAT)],
        "replicated": [Parameter(((0, 10), (0, 3)), HALF)],
        "columns": [Parameter(((0, 5), (3 * rank, 3 * rank + 3)), FLOAT)],
        # Wider than the tensor.
        "scalar": [Parameter((), torch.float64)],
        "halves": [Parameter(((5 * node, min(9, 5 * node + 5)),), FLOAT)],
        "padded": [Parameter(((3 * node, 3 * node + 3), (0, 5)), FLOAT, padding=2)],
        "twice": [Parameter(((2 * i, 2 * i + 2), (0, 2)), FLOAT) for i in (rank, (rank + 1) % 4)],
    }


def random_truth(seed=0, pieces=PIECES):
    generator = torch.Generator().manual_seed(seed)
    return {spec.name: torch.randn(spec.shape, generator=generator).to(getattr(torch, spec.dtype)) for spec in pieces}


def new_engine():
    return PeerEngine([four_ranks(rank) for rank in range(RANKS)])


@pytest.fixture
def make_world(in_process_store):
    worlds = []

    def make(num_engines=1, *, pieces=PIECES, engine=new_engine, bucket_bytes=200, **settings):
        worlds.append(
            World(pieces, random_truth(0, pieces), [engine() for _ in range(num_engines)], num_ranks=2,
                  bucket_bytes=bucket_bytes, **settings)
        )  # fmt: skip
        return worlds[-1]

    yield make
    for world in worlds:
        world.leave()


def send(world, version, seed=0, pieces=PIECES):
    truth = random_truth(seed, pieces)
    for source in world.sources:
        source.truth = truth
    for engine in world.engines:
        engine.clear()
    return all_at_once(world.calls(version)), truth


def kept_bytes(engine, pieces=PIECES):
    """(bytes that each rank keeps, bytes of all regions that differ) by the dtypes that are sent."""
    sizes = {spec.name: ITEM_BYTES[spec.dtype] for spec in pieces}
    of_rank = [
        sum(elements(region.box) * sizes[name] for name, each in regions.items() for region in each)
        for regions in engine.regions
    ]
    different = {(name, region.box) for regions in engine.regions for name, each in regions.items() for region in each}
    return of_rank, sum(elements(box) * sizes[name] for name, box in different)


def test_every_parameter_holds_the_truth_and_each_byte_came_once(make_world):
    world = make_world()
    (engine,) = world.engines
    of_rank, different = kept_bytes(engine)
    assert len(world.plans[0].rounds[EngineModel.target]) > 4
    for version, seed in ((3, 1), (9, 2)):
        outcome, truth = send(world, version, seed)
        assert outcome.errors == {}
        assert engine.wrong(truth) == []
        assert [outcome.values["engine", 0, rank] for rank in range(RANKS)] == [[nbytes] for nbytes in of_rank]
        assert sum(sender.sent_bytes for sender in world.senders[0]) == different


@pytest.mark.parametrize("bucket_bytes", [64, 500, 10**6])
def test_any_number_of_rounds_gives_the_same(make_world, bucket_bytes):
    world = make_world(bucket_bytes=bucket_bytes)
    outcome, truth = send(world, 1)
    assert outcome.errors == {}
    assert world.engines[0].wrong(truth) == []
    rounds = world.plans[0].rounds[EngineModel.target]
    assert (len(rounds) == 1) is (bucket_bytes == 10**6)
    # Each end holds two slots, in which each message begins at a multiple of ALIGNMENT.
    slack = ALIGNMENT * max(map(len, rounds))
    assert all(0 < sender.nbytes <= bucket_bytes + 2 * slack for sender in world.senders[0])


def test_engines_pass_a_version_on_from_one_to_the_next_round_by_round(make_world):
    world = make_world(3)
    assert [plan.feeder for plan in world.plans] == [None, 0, 1]
    assert [len(senders) for senders in world.senders] == [2, 0, 0]
    of_rank, different = kept_bytes(world.engines[0])
    for version in (1, 2):
        outcome, truth = send(world, version, seed=version)
        assert outcome.errors == {}
        for index, engine in enumerate(world.engines):
            assert engine.wrong(truth) == []
            assert [outcome.values["engine", index, rank] for rank in range(RANKS)] == [[each] for each in of_rank]
        assert sum(sender.sent_bytes for sender in world.senders[0]) == different


def test_a_draft_model_gets_its_tensors_through_the_same_group(make_world):
    pieces = PIECES | {spec_of("next", (8, 3), mtp=True): [(((0, 8), (0, 3)), (0, 1))]}

    def engine():
        draft = {"next": [Parameter(((0, 8), (0, 3)), FLOAT)]}
        return PeerEngine([four_ranks(rank) | draft for rank in range(RANKS)], ["next"])

    world = make_world(2, pieces=pieces, engine=engine)
    for version in (1, 2):
        outcome, truth = send(world, version, version, pieces)
        assert outcome.errors == {}
        assert [engine.wrong(truth) for engine in world.engines] == [[], []]
        assert outcome.values["engine", 1, 3][1] == 8 * 3 * 4


def test_ranks_that_are_sent_nothing_from_outside_feed_nothing_and_the_group_forms_all_the_same(make_world):
    pieces = {spec_of("w", (3,)): [(((0, 3),), (0,))]}

    def engine():
        return PeerEngine([{"w": [Parameter(((0, 3),), FLOAT)]}] * RANKS)

    world = make_world(2, pieces=pieces, engine=engine, bucket_bytes=10**6)
    assert {m.target for messages in world.plans[0].rounds[EngineModel.target] for m in messages} == {0}
    outcome, truth = send(world, 1, pieces=pieces)
    assert outcome.errors == {}
    assert [engine.wrong(truth) for engine in world.engines] == [[], []]
    assert outcome.seconds < FEED_FRACTION * world.timeout_s / 2


def test_ranks_that_get_their_first_message_in_a_late_round_feed_it_in_each_version(make_world):
    """One rank has the first of the 12 rounds, and the other the last ones."""
    pieces = {spec_of(name, (6, 4)): [(((0, 6), (0, 4)), (0,))] for name in "ab"}

    def engine():
        return PeerEngine([{name: [Parameter(((0, 6), (0, 4)), FLOAT)]} for name in "ab"])

    world = make_world(4, pieces=pieces, engine=engine, bucket_bytes=2 * 16, timeout_s=5.0)
    rounds = world.plans[0].rounds[EngineModel.target]
    firsts = [next(i for i, each in enumerate(rounds) if rank in {m.target for m in each}) for rank in range(2)]
    assert firsts[0] == 0 < firsts[1] - 4
    for version in (1, 2):
        outcome, truth = send(world, version, version, pieces)
        assert outcome.errors == {}
        assert [engine.wrong(truth) for engine in world.engines] == [[]] * 4
        # Longer than it may take to feed a version.
        time.sleep(1.1 * FEED_FRACTION * world.timeout_s if version == 1 else 0)


def test_all_ranks_are_told_what_one_of_them_cannot_do_and_which_bytes_came_to_each(make_world, monkeypatch):
    world = make_world()
    (engine,), (group,), (plan,) = world.engines, world.groups, world.plans
    monkeypatch.setattr(kept_tensors, "kept_regions", lambda model: engine.regions[model.rank])
    models = [SimpleNamespace(rank=rank) for rank in range(RANKS)]

    def tell(payloads, others=None):
        values = [pickle.loads(base64.b64decode(payload)) for payload in payloads]
        calls = {
            rank: lambda rank=rank: update(models[rank], values[rank], engine.ranks[rank]) for rank in range(RANKS)
        }
        outcome = all_at_once(calls | (others or {}))
        assert set(outcome.errors) <= set(others or {})
        return [outcome.values[rank] for rank in range(RANKS)]

    plain = [{model.value: plain_rounds(r) for model, r in each.items()} for each in plan.rounds_by_rank()]
    assert tell([join_payload(group, each, None) for each in plain]) == [(True, "Success")] * RANKS
    senders = {key: call for key, call in world.calls(5).items() if key[0] == "trainer"}
    told = tell([receive_payload(group.name, EngineModel.target, 5)] * RANKS, senders)
    assert told == [(True, str(kept_bytes(engine)[0]))] * RANKS
    assert engine.wrong(random_truth()) == []
    # A model that has shards copied into it derives what it computes from them afterwards.
    assert all(model.slimrl_placed_weights for model in models)

    told = tell([receive_payload("another", EngineModel.target, 6)] * RANKS)
    assert told == [(False, "; ".join(f"rank {rank}: GroupError: not in group another" for rank in range(4)))] * RANKS

    del engine.regions[2]["columns"]
    told = tell([receive_payload(group.name, EngineModel.target, 6)] * RANKS, senders | {
        key: call for key, call in world.calls(6).items() if key[0] == "trainer"
    })  # fmt: skip
    assert {success for success, _ in told} == {False}
    (message,) = {message for _, message in told}
    assert "rank 2: ValueError: this rank does not keep " in message
    assert "of columns" in message
    for rank in engine.ranks:
        leave_group(rank)
        leave_group(rank)
        assert rank.kept == {}


def test_rounds_are_plain_values_on_their_way_and_the_same_behind_it(make_world):
    (plan,) = make_world().plans
    for rounds in plan.rounds_by_rank():
        each = rounds[EngineModel.target]
        plain = plain_rounds(each)
        assert b"slimrl" not in pickle.dumps(plain)
        assert parse_rounds(pickle.loads(pickle.dumps(plain))) == each


def assert_only_group_errors(outcome, *texts):
    """All ended in an error of the group, and each text is in one of them."""
    assert {type(error) for error in outcome.errors.values()} == {GroupError}
    for text in texts:
        assert any(text in str(error) for error in outcome.errors.values()), (text, outcome.errors)


def test_a_length_that_is_not_the_planned_one_breaks_the_version_at_once_and_names_both(make_world):
    world = make_world(timeout_s=30.0)
    other = EnginePlans(world.tensors, [world.engines[0].kept], num_ranks=2, bucket_bytes=1000).of(0)
    assert other.sources == world.plans[0].sources
    world.plans = [other]
    world.engines[0].join(world.groups[0], other)
    outcome = all_at_once(world.calls(1))
    assert outcome.seconds < 10
    assert len(outcome.errors) == RANKS + 2
    assert_only_group_errors(outcome, "announces version, round and bytes [1, 0, ", "planned are [1, 0, ")


def test_another_version_breaks_off_at_once_and_names_both(make_world):
    world = make_world(timeout_s=30.0)
    calls = {key: call for key, call in world.calls(7).items() if key[0] == "engine"}
    calls |= {key: call for key, call in world.calls(8).items() if key[0] == "trainer"}
    outcome = all_at_once(calls)
    assert outcome.seconds < 10
    assert len(outcome.errors) == RANKS + 2
    assert_only_group_errors(outcome, "announces version, round and bytes [8, 0, ", "planned are [7, 0, ")


def test_a_sender_that_leaves_in_mid_version_is_noticed_at_once_and_a_new_group_works(make_world):
    world = make_world(timeout_s=30.0)
    wrote, original = Counter(), world.values[1].write

    def breaks(name, box, target):
        wrote[name] += 1
        if wrote["columns"] == 3:
            raise OSError("the disk is gone")
        original(name, box, target)

    world.values[1].write = breaks
    outcome = all_at_once(world.calls(1))
    assert outcome.seconds < 10
    assert str(outcome.errors.pop(("trainer", 0, 1))) == "the disk is gone"
    assert wrote.total() > 3
    assert len(outcome.errors) == RANKS + 1
    assert_only_group_errors(outcome, "message from member ")
    assert all(sender.nbytes == 0 for sender in world.senders[0])

    world.values[1].write = original
    world.join()
    outcome, truth = send(world, 1)
    assert outcome.errors == {}
    assert world.engines[0].wrong(truth) == []


def test_a_receiver_that_never_answers_costs_the_sender_its_deadline_and_no_more(make_world):
    world = make_world(timeout_s=30.0)
    (spec,) = world.groups
    calls = world.calls(1, send_s=1.0)
    done = threading.Event()

    def only_joins():
        member = PeerGroup(spec, 2)
        done.wait(20)
        member.drop()

    def send_and_end(key):
        try:
            return calls[key]()
        finally:
            done.set()

    silent = {key: calls[key] for key in calls if key not in (("engine", 0, 2), ("trainer", 0, 0), ("trainer", 0, 1))}
    both = {key: lambda key=key: send_and_end(key) for key in calls if key[0] == "trainer"}
    outcome = all_at_once(silent | both | {"silent": only_joins})
    assert outcome.values == {"silent": None}
    assert 0.9 < outcome.seconds < 8
    assert_only_group_errors(outcome, "message from member 2: ")


def test_a_member_that_never_joins_is_an_error_of_all_others_and_engines_say_so_first(make_world):
    world = make_world(timeout_s=1.5)
    calls = world.calls(1)
    del calls["engine", 0, 1]
    ended = {}

    def timed(key):
        try:
            calls[key]()
        finally:
            ended[key] = time.monotonic()

    start = time.monotonic()
    outcome = all_at_once({key: lambda key=key: timed(key) for key in calls})
    assert outcome.seconds < 6
    assert len(outcome.errors) == RANKS + 1
    assert all(str(error).startswith(f"joining group {world.groups[0].name}: ") for error in outcome.errors.values())
    waited = {key: at - start for key, at in ended.items()}
    assert all(waited[key] == pytest.approx(WAIT_FRACTION * 1.5, abs=0.25) for key in waited if key[0] == "engine")


@pytest.mark.parametrize("fault", ["another version", "never joins", "lacks a region"])
def test_an_engine_that_is_fed_and_breaks_does_not_break_the_one_that_feeds_it(make_world, fault):
    world = make_world(2, timeout_s=5.0)
    calls = world.calls(1)
    fed = [key for key in calls if key[:2] == ("engine", 1)]
    if fault == "another version":
        calls |= {key: call for key, call in world.calls(2).items() if key in fed}
    elif fault == "never joins":
        for key in fed:
            del calls[key]
    else:
        del world.engines[1].regions[3]["rows"]
    outcome = all_at_once(calls)
    assert world.engines[0].wrong(random_truth()) == []
    assert {key for key in outcome.errors if key[:2] != ("engine", 1)} == set()
    assert outcome.seconds < (WAIT_FRACTION * 5 + 1 if fault == "never joins" else 2)
    if fault != "never joins":
        assert set(outcome.errors) == set(fed)
    # The version after is not fed either, and comes to the engine that is whole.
    only_first = {key: call for key, call in world.calls(2).items() if key not in fed}
    world.engines[0].clear()
    outcome = all_at_once(only_first)
    assert (outcome.errors, world.engines[0].wrong(random_truth())) == ({}, [])
    assert outcome.seconds < 2


def test_a_region_that_a_rank_does_not_keep_is_named_and_all_others_notice(make_world):
    world = make_world(timeout_s=30.0)
    box, memory = world.engines[0].regions[1]["rows"][0]
    world.engines[0].regions[1]["rows"] = [kept_tensors.KeptRegion(((5, 8), box[1]), memory)]
    outcome = all_at_once(world.calls(1))
    assert outcome.seconds < 10
    error = outcome.errors.pop(("engine", 0, 1))
    assert isinstance(error, ValueError)
    assert str(error).startswith("this rank does not keep [(4, ")
    assert str(error).endswith(" of rows")
    assert_only_group_errors(outcome)


def group_of(world_size, timeout_s=20.0, port=1):
    return GroupSpec(
        name="slimrl-test", address="127.0.0.1", port=port, world_size=world_size, backend="gloo", timeout_s=timeout_s
    )


@pytest.mark.usefixtures("in_process_store")
def test_numbers_and_messages_come_to_the_member_they_are_for():
    spec = group_of(3)
    deadline = time.monotonic() + 20

    def sender():
        group = PeerGroup(spec, 2)
        told = group.tell([0, 1], [(5, 6), (7, 8)], deadline)
        assert group.told([1, 0], 1, deadline) == [[11], [10]]
        told.wait()
        values = torch.arange(20, dtype=torch.uint8)
        group.start([Move(0, values[:8], True), Move(1, values[8:], True)], deadline).wait()
        group.drop()

    def receiver(member, size):
        group = PeerGroup(spec, member)
        (numbers,) = group.told([2], 2, deadline)
        data = torch.zeros(size, dtype=torch.uint8)
        group.tell([2], [[10 + member]], deadline).wait()
        group.start([Move(2, data, False)], deadline).wait()
        group.drop()
        return numbers, data.tolist()

    outcome = all_at_once({2: sender, 0: lambda: receiver(0, 8), 1: lambda: receiver(1, 12)})
    assert outcome.errors == {}
    assert [outcome.values[0], outcome.values[1]] == [([5, 6], list(range(8))), ([7, 8], list(range(8, 20)))]


@pytest.mark.usefixtures("in_process_store")
def test_a_member_that_left_a_group_sends_and_receives_nothing_more():
    spec = group_of(1)
    group = PeerGroup(spec, 0)
    group.drop()
    group.drop()
    for call in (lambda: group.tell([0], [[1]], 0.0), lambda: group.start([Move(0, torch.zeros(1), True)], 0.0)):
        with pytest.raises(GroupError, match="this member has left the group"):
            call()


@pytest.mark.usefixtures("in_process_store")
def test_an_error_that_is_kept_keeps_no_connection_of_a_group_that_was_dropped():
    """Neither by the message that failed nor by those that are under way in some frame."""
    spec = group_of(3, timeout_s=30.0)
    members = all_at_once({rank: lambda rank=rank: PeerGroup(spec, rank) for rank in range(3)}).values
    data = torch.zeros(1000, dtype=torch.uint8)

    def fail(member):
        under_way = member.start([Move(1, data, False), Move(2, data, False)], time.monotonic() + 30)
        member.told([2], 1, time.monotonic() + 30)
        under_way.wait()

    def waits_for_what_never_comes(peer):
        members[peer].told([0], 1, time.monotonic() + 30)

    kept = []

    def leaves():
        try:
            fail(members[0])
        except GroupError as error:
            kept.append(error)
        members[0].drop()

    calls = {0: leaves, 1: lambda: waits_for_what_never_comes(1)}
    threading.Timer(0.3, members[2].drop).start()
    outcome = all_at_once(calls)
    assert outcome.seconds < 5
    assert "message from member 0: " in str(outcome.errors[1])
    assert "message from member 2: " in str(kept[0])
    members[1].drop()


@pytest.mark.usefixtures("in_process_store")
def test_messages_that_are_under_way_when_a_member_leaves_did_not_end():
    spec = group_of(2, timeout_s=30.0)
    members = all_at_once({0: lambda: PeerGroup(spec, 0), 1: lambda: PeerGroup(spec, 1)}).values
    pending = members[0].start([Move(1, torch.zeros(8, dtype=torch.uint8), False)], time.monotonic() + 30)
    members[0].drop()
    with pytest.raises(GroupError, match="this member has left the group"):
        pending.wait()
    members[1].drop()


@pytest.mark.usefixtures("in_process_store")
def test_messages_share_a_deadline_and_none_outlasts_it():
    spec = group_of(2, timeout_s=30.0)
    members = all_at_once({0: lambda: PeerGroup(spec, 0), 1: lambda: PeerGroup(spec, 1)}).values
    start = time.monotonic()
    moves = [Move(1, torch.zeros(1000, dtype=torch.uint8), sends) for sends in (False, True)]
    pending = members[0].start(moves, start + 0.5)
    with pytest.raises(GroupError, match="message from member 1: "):
        pending.wait()
    with pytest.raises(GroupError, match="message to member 1: "):
        pending.wait()
    assert time.monotonic() - start < 3
    for member in members.values():
        member.drop()


def test_members_find_each_other_through_the_trainer_s_store():
    store = serve_store("127.0.0.1", 20.0)
    spec = group_of(2, port=store.port)
    members = all_at_once({0: lambda: PeerGroup(spec, 0), 1: lambda: PeerGroup(spec, 1)}).values
    deadline = time.monotonic() + 20
    told = all_at_once({0: lambda: members[0].tell([1], [[7]], deadline).wait(),
                        1: lambda: members[1].told([0], 1, deadline)})  # fmt: skip
    assert told.values == {0: None, 1: [[7]]}
    for member in members.values():
        member.drop()


def test_a_member_that_waits_for_another_group_does_not_keep_one_from_joining():
    """Both are in the process that serves the store."""
    store = serve_store("127.0.0.1", 5.0)
    absent, whole = replace(group_of(2, 4.0, store.port), name="absent"), group_of(2, 4.0, store.port)
    started = threading.Thread(target=lambda: all_at_once({0: lambda: PeerGroup(absent, 0)}))
    started.start()
    time.sleep(0.3)
    start = time.monotonic()
    members = all_at_once({0: lambda: PeerGroup(whole, 0), 1: lambda: PeerGroup(whole, 1)}).values
    assert time.monotonic() - start < 2
    for member in members.values():
        member.drop()
    started.join()


def test_a_member_that_does_not_join_is_an_error_within_the_deadline():
    store = serve_store("127.0.0.1", 0.5)
    spec = group_of(2, 0.5, store.port)
    start = time.monotonic()
    with pytest.raises(GroupError, match="joining group slimrl-test: "):
        PeerGroup(spec, 0)
    assert time.monotonic() - start < 3


def test_no_store_at_the_address_is_an_error_within_the_deadline():
    store = serve_store("127.0.0.1", 0.5)
    spec = group_of(2, 0.5, store.port)
    del store
    with pytest.raises(GroupError, match="joining group slimrl-test: "):
        PeerGroup(spec, 1)


def test_the_store_listens_on_the_given_address_alone():
    store = serve_store("127.0.0.1", 5.0)
    listening = {each.laddr.ip for each in psutil.Process().net_connections("tcp") if each.laddr.port == store.port}
    assert listening == {"127.0.0.1"}


def test_a_rank_alone_leaves_a_group_that_it_never_joined():
    ranks = OnlyRank()
    payload = join_payload(group_of(1), {"target": []}, None)
    assert update(SimpleNamespace(), pickle.loads(base64.b64decode(payload)), ranks) == (True, "Success")
    assert ranks.kept
    leave_group(ranks)
    assert ranks.kept == {}


def test_the_models_of_an_engine_share_the_deadline_of_a_version(monkeypatch):
    clock, deadlines = iter([100.0, 200.0]), []
    monkeypatch.setattr(peer_receiver, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(peer_receiver, "PeerGroup", lambda spec, member: None)
    spec = GroupSpec(name="g", address="", port=1, world_size=2, backend="gloo", timeout_s=10.0)
    receiver = PeerReceiver(spec, OnlyRank(), {"target": [], "draft": []}, None)
    monkeypatch.setattr(receiver, "_receive", lambda *given: deadlines.append(given[-1]))
    for version, model in ((1, "target"), (1, "draft"), (2, "target")):
        receiver.receive(model, version, {})
    assert deadlines == [100 + 10 * WAIT_FRACTION] * 2 + [200 + 10 * WAIT_FRACTION]
