"""Versions through shared memory, from trainers on several nodes: each node gets once what its engines keep."""

import os
import re
from collections import Counter
from dataclasses import replace

import pytest
import test_resync_ranks
import torch
from resync_engines import Engine, config, session
from resync_engines import Source as WholeSource
from test_node_memory import nth
from test_resync_ranks import REGIONS, SHAPES, Source, random_weights
from thread_dist import ThreadDist

from slimrl import device
from slimrl.config.schema.resync import VerifyMode
from slimrl.data.boxes import Box, elements, intersection, slices_of
from slimrl.data.engine import EngineError
from slimrl.data.model_weights import EngineModel, EnginePlace
from slimrl.engines.plugin.kept_tensors import KeptRegion
from slimrl.engines.plugin.peer_receiver import place
from slimrl.estimates.resync.machine import Machine
from slimrl.estimates.resync.shared_estimate import estimate_shared
from slimrl.resync import ranks
from slimrl.resync.ipc import rank_rounds
from slimrl.resync.ipc.receivers import node_engines
from slimrl.resync.ipc.shared_buffer import SHARED_MEMORY_DIR, open_shared
from slimrl.resync.p2p.demand import sent_tensors
from slimrl.resync.p2p.sent_values import SentValues
from slimrl.resync.ranks import RankError, Ranks
from slimrl.resync.report import ResyncError

pytestmark = pytest.mark.skipif(device.device_type() == "cuda", reason="the engines here map host memory")

HELD_BY_ALL = {
    name: [(tuple(edge for size in shape for edge in (0, size)), (0, 1, 2, 3))] for name, shape in SHAPES.items()
}
"""As REGIONS, where each rank holds all"""
SHARDED = {"rows": 0, "columns": 1, "halves": 1, "on last": 0}
"""Dimension along which engines shard a tensor; each of their ranks keeps all of the others."""


def cut(size: int, parts: int, index: int) -> tuple[int, int]:
    return size * index // parts, size * (index + 1) // parts


class ShardedEngine(Engine):
    """An engine of several ranks, evenly on its nodes."""

    def __init__(self, name: str, nodes: str, num_ranks: int) -> None:
        super().__init__(name)
        self.place = EnginePlace(name=name, nodes=tuple(nodes), num_ranks=num_ranks)
        self.memory = [self._regions_of(rank) for rank in range(num_ranks)]

    def _regions_of(self, rank):
        regions = {}
        for name, value in random_weights().items():
            box = [(0, size) for size in value.shape]
            if name in SHARDED:
                box[SHARDED[name]] = cut(value.shape[SHARDED[name]], self.place.num_ranks, rank)
            memory = torch.full([stop - start for start, stop in box], torch.nan)
            if memory.numel():
                regions[name] = [KeptRegion(tuple(box), memory)]
        return regions

    def kept(self, model):
        return [{name: [region.box for region in each] for name, each in rank.items()} for rank in self.memory]

    def map_memory(self, segments, rounds):
        self._note("map")
        assert len(rounds) == self.place.num_ranks
        self._segments, self._loads = segments, rounds

    def load_round(self, model, number, slot):
        self._note("load")
        for regions, rounds in zip(self.memory, self._loads, strict=True):
            of_model = rounds[model]
            for message, offset in of_model[number] if number < len(of_model) else ():
                memory = open_shared(self._segments[message.source][slot])
                place(message.entries, memory[offset:], regions)

    def wrong(self, weights) -> list[str]:
        """Tensors of which a rank does not hold its part of the weights."""
        return [
            name
            for rank in self.memory
            for name, ((box, memory),) in rank.items()
            if not torch.equal(memory, weights[name][slices_of(box, tuple((0, 0) for _ in box))])
        ]

    def kept_on(self, node: str) -> int:
        """Bytes that its ranks on a node keep, counted once."""
        return 4 * sum(elements(box) for _, box in self.regions_on(node))

    def regions_on(self, node: str) -> set[tuple[str, Box]]:
        """(tensor, region) that its ranks on a node keep."""
        per_node = self.place.num_ranks // len(self.place.nodes)
        here = [rank for rank in range(self.place.num_ranks) if self.place.nodes[rank // per_node] == node]
        return {(name, r.box) for rank in here for name, (r,) in self.memory[rank].items()}


class CountingDist(ThreadDist):
    """Counts bytes of messages by their ends."""

    def __init__(self, size):
        super().__init__(size)
        self.sent = Counter()

    def batch_isend_irecv(self, operations):
        for function, tensor, peer in operations:
            if function == self.isend:
                self.sent[self.get_rank(), peer] += tensor.nbytes
        return super().batch_isend_irecv(operations)


@pytest.fixture
def threads(monkeypatch):
    threads = CountingDist(4)
    for module in (ranks, rank_rounds):
        monkeypatch.setattr(module, "dist", threads)
    yield threads
    assert threads.left == threads.made


def resynced(threads, nodes, engines, versions=(1,), after=lambda resync, version: None):
    """Send versions with the weights of their number as seed; by rank, the reports or the error."""

    def run(rank):
        settings = config(bucket_bytes=160, verify=VerifyMode.off)
        resync = session(Source(rank, random_weights()), engines, settings, rank=rank, node=nodes[rank], run_id="ipc")
        reports = []
        try:
            for version in versions:
                resync._source.weights = random_weights(version)
                reports.append(resync.run(version))
                after(resync, version)
        except ResyncError as error:
            return error
        finally:
            resync.close()
        return reports

    return threads.run(run)


LAYOUTS = {
    "one on each node": ("aabb", [("a", 2), ("b", 2)]),
    "one over both nodes": ("aabb", [("ab", 4)]),
    "one over two of four nodes": ("abcd", [("bd", 2)]),
    "two over two nodes each": ("abcd", [("ab", 2), ("cd", 2)]),
    "over other nodes, one of which is shared": ("aabb", [("ab", 2), ("b", 1)]),
    "unlike ones beside each other": ("aabb", [("a", 2), ("a", 1), ("b", 1), ("b", 2)]),
    "more ranks than the trainer": ("aaaa", [("a", 2), ("a", 2), ("a", 2)]),
    "one rank for all": ("aaaa", [("a", 1)]),
}


@pytest.mark.parametrize(("nodes", "engines"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_rank_gets_what_it_keeps_and_no_node_gets_more_than_its_engines_keep(threads, nodes, engines):
    engines = [ShardedEngine(f"engine {i}", where, ranks) for i, (where, ranks) in enumerate(engines)]
    results = resynced(threads, nodes, engines, versions=(1, 2))
    assert [engine.wrong(random_weights(2)) for engine in engines] == [[]] * len(engines)
    report = results[0][-1]
    assert report.buckets > 2
    for (source, target), nbytes in threads.sent.items():
        assert nodes[source] != nodes[target]
        assert nbytes > 0
    for node in set(nodes):
        came = sum(nbytes for (_, target), nbytes in threads.sent.items() if nodes[target] == node)
        assert came <= len(results[0]) * lacking(node, nodes, engines)
    assert sum(report.sent_per_rank) >= report.bytes


def lacking(node, nodes, engines):
    """Bytes that ranks of engines on a node keep and no trainer rank there holds, each region that they keep once."""
    found = set()
    for engine in engines:
        for name, box in engine.regions_on(node):
            for edges, holders in REGIONS[name]:
                piece = tuple(zip(edges[::2], edges[1::2], strict=True))
                common = intersection(box, piece)
                if common and not any(nodes[holder] == node for holder in holders):
                    found.add((name, common))
    return 4 * sum(elements(box) for _, box in found)


def test_nothing_crosses_the_network_on_one_node(threads):
    engine = ShardedEngine("engine 0", "a", 2)
    resynced(threads, "aaaa", [engine])
    assert (engine.wrong(random_weights(1)), threads.sent) == ([], Counter())


def test_what_a_node_keeps_twice_crosses_the_network_once(threads):
    engines = [ShardedEngine(f"engine {i}", "b", 1) for i in range(2)]
    resynced(threads, "aabb", engines)
    assert [engine.wrong(random_weights(1)) for engine in engines] == [[], []]
    assert sum(threads.sent.values()) <= engines[0].kept_on("b")


def test_what_all_ranks_of_an_engine_keep_comes_to_each_of_its_nodes_once(threads):
    engine = ShardedEngine("engine 0", "abcd", 4)
    resynced(threads, "abcd", [engine])
    assert engine.wrong(random_weights(1)) == []
    for node in "abcd":
        came = sum(nbytes for (_, target), nbytes in threads.sent.items() if "abcd"[target] == node)
        assert came <= engine.kept_on(node)


@pytest.mark.parametrize(("nodes", "engines"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_the_estimate_counts_the_bytes_that_are_sent(threads, nodes, engines):
    where, num_ranks = engines[0]
    alike = [at for at, _ in engines if len(at) == len(where)]
    engines = [ShardedEngine(f"engine {i}", at, num_ranks) for i, at in enumerate(alike)]
    results = resynced(threads, nodes, engines)
    layout = Source(0, random_weights()).layout()
    models = {EngineModel.target: engines[0].kept(EngineModel.target)}
    found = estimate_shared(
        layout, nodes, [engine.place for engine in engines], Machine(), tensors=sent_tensors(layout, None),
        models=models, bucket_bytes=160, transform=None,
    )  # fmt: skip
    sent = results[0][0].sent_per_rank
    assert found.link_bytes.get("network", 0) == sum(threads.sent.values())
    assert (found.rounds, found.sent_by_rank.most) == (results[0][0].buckets, pytest.approx(max(sent), abs=16))
    assert found.sent_by_rank.mean == sum(sent) // len(nodes)


def test_an_engine_that_is_new_gets_the_plan_and_the_others_keep_theirs(threads):
    engines = [ShardedEngine(f"engine {i}", "ab"[i], 1) for i in range(2)]
    new = ShardedEngine("engine 1", "b", 1)

    def after(resync, version):
        if version == 1:
            resync.use([engines[0], new])

    resynced(threads, "aabb", engines, (1, 2), after)
    assert (engines[0].wrong(random_weights(2)), new.wrong(random_weights(2))) == ([], [])
    assert [engine.calls.count("map") for engine in (*engines, new)] == [1, 1, 1]
    assert engines[1].wrong(random_weights(1)) == []


def test_engines_that_are_others_than_before_have_all_planned_anew(threads):
    engines = [ShardedEngine("engine 0", "a", 1), ShardedEngine("engine 1", "b", 2)]
    resynced(threads, "aabb", engines[:1], (1, 2), lambda resync, version: resync.use(engines))
    assert [engine.wrong(random_weights(2)) for engine in engines] == [[], []]
    assert engines[0].calls.count("map") == 2


def test_an_engine_that_refuses_its_plan_gets_it_again_and_one_that_does_so_twice_is_out(threads):
    once, never = ShardedEngine("engine 0", "a", 1), ShardedEngine("engine 1", "b", 1)
    once.fails_at = ("map", 1)

    def refuse(segments, rounds):
        raise EngineError("engine 1: map: refused")

    never.map_memory = refuse
    results = resynced(threads, "aabb", [once, never])
    assert results[0][0].failed_engines == {"engine 1": "engine 1: map: refused"}
    assert once.wrong(random_weights(1)) == []


def test_what_each_node_holds_itself_crosses_no_network_also_for_an_engine_over_both(threads, monkeypatch):
    monkeypatch.setattr(test_resync_ranks, "REGIONS", HELD_BY_ALL)
    engine = ShardedEngine("engine 0", "ab", 4)
    resynced(threads, "aabb", [engine])
    assert (engine.wrong(random_weights(1)), threads.sent) == ([], Counter())


def test_nodes_whose_engines_use_other_receivers_are_not_taken_for_alike(threads):
    # Two engines of one rank for two trainer ranks, and for one: the same digests.
    engines = [ShardedEngine(f"engine {i}", node, 1) for i, node in enumerate("aabb")]
    resynced(threads, "aaab", engines)
    assert [engine.wrong(random_weights(1)) for engine in engines] == [[]] * 4


def test_memory_that_is_missing_for_a_round_fails_the_version_on_all_ranks(threads, monkeypatch):
    write = SentValues.write

    def scarce(self, name, box, target):
        if name == "on second":
            raise torch.OutOfMemoryError("CUDA out of memory")
        write(self, name, box, target)

    monkeypatch.setattr(SentValues, "write", scarce)
    results = resynced(threads, "aabb", [ShardedEngine("engine 0", "a", 1)])
    for error in results:
        assert re.search(r"failed at round \d+ of \d+: no memory to quantise or merge .* out of memory", str(error))


def test_slots_stay_where_another_plan_needs_no_larger_ones(threads):
    engines, segments = [ShardedEngine(f"engine {i}", "a", 1) for i in range(2)], []

    def after(resync, version):
        segments.append(sorted(SHARED_MEMORY_DIR.glob(f"slimrl-ipc-{os.getpid()}-*")))
        resync.use(engines[: 2 - version % 2])

    resynced(threads, "aaaa", engines, (1, 2, 3), after)
    assert engines[0].calls.count("map") == 3
    assert set(segments[2]) <= set(segments[0])
    assert engines[0].wrong(random_weights(3)) == []


def test_what_ranks_write_is_there_before_they_agree_on_a_round(threads, monkeypatch):
    """On a GPU their copies are only queued."""
    queued, open_at_agreements = Counter(), []
    write, agree = SentValues.write, Ranks.agree

    def counted(self, *given):
        queued[threads.get_rank()] += 1
        write(self, *given)

    def noted(self, verdict):
        open_at_agreements.append(queued[self.rank])
        return agree(self, verdict)

    monkeypatch.setattr(SentValues, "write", counted)
    monkeypatch.setattr(device, "finish_queued_work", lambda: queued.pop(threads.get_rank(), None))
    monkeypatch.setattr(Ranks, "agree", noted)
    resynced(threads, "aabb", [ShardedEngine("engine 0", "ab", 4)])
    assert len(open_at_agreements) > 10
    assert not any(open_at_agreements)


def test_a_tensor_that_an_engine_lacks_is_named_before_anything_is_sent(threads):
    engine = ShardedEngine("engine 0", "ab", 2)
    for rank in engine.memory:
        del rank["on last"]
    results = resynced(threads, "aabb", [engine])
    for error in results:
        assert "failed before the first message: engine 0: no such tensor in its model: on last" in str(error)
    assert not {"map", "load"} & set(engine.calls)


def test_an_engine_may_keep_tensors_on_one_of_its_nodes_alone(threads):
    """As those of its experts."""
    engine = ShardedEngine("engine 0", "ab", 2)
    del engine.memory[0]["on last"], engine.memory[1]["on second"]
    resynced(threads, "aabb", [engine])
    assert engine.wrong(random_weights(1)) == []


def test_an_engine_beside_no_trainer_rank_is_refused():
    places = [EnginePlace(name="engine 0", nodes=("a", "c"), num_ranks=2)]
    with pytest.raises(ValueError, match=r"ipc, but engine 0 is on c, the trainer on a, b\. Use p2p or disk"):
        node_engines(places, "aab")


def test_ranks_of_engines_take_the_trainer_ranks_of_their_node_in_turn():
    places = [
        EnginePlace(name="x", nodes=("a", "b"), num_ranks=4),
        EnginePlace(name="y", nodes=("a",), num_ranks=1),
        EnginePlace(name="z", nodes=("a",), num_ranks=1),
    ]
    first, second = node_engines(places, "aaabb")
    assert first.receivers == {"x": {0: 0, 1: 1}, "y": {0: 2}, "z": {0: 0}}
    assert second.receivers == {"x": {2: 3, 3: 4}}
    assert [(each.leader, each.all_receivers) for each in (first, second)] == [(0, (0, 1, 2)), (3, (3, 4))]


@pytest.mark.parametrize("number", [1, 2])
def test_a_slot_that_cannot_be_made_leaves_none_of_the_others(monkeypatch, number):
    monkeypatch.setattr(rank_rounds, "shared_buffer", nth(number, rank_rounds.shared_buffer, OSError("no room")))
    weights = {"w": torch.ones(32, 16)}
    resync = session(WholeSource(weights), [Engine("engine 0", keeps=weights)], config(bucket_bytes=512), run_id="full")
    with pytest.raises(ResyncError, match=r"rank 0: buffers of a resync: no room"):
        resync.run(1)
    assert list(SHARED_MEMORY_DIR.glob("slimrl-full-*")) == []
    monkeypatch.undo()
    assert resync.run(1).mismatching == ()
    resync.close()
    assert list(SHARED_MEMORY_DIR.glob("slimrl-full-*")) == []


def test_a_rank_that_dies_while_slots_are_made_leaves_none_of_this_one(monkeypatch):
    weights = {"w": torch.ones(32, 16)}
    resync = session(WholeSource(weights), [Engine("engine 0", keeps=weights)], config(bucket_bytes=512), run_id="died")

    def gather(ranks, value):
        if value and isinstance(value, list) and isinstance(value[0], str):
            raise RankError("dead")
        return [value]

    monkeypatch.setattr(Ranks, "gather_objects", gather)
    with pytest.raises(ResyncError, match="dead"):
        resync.run(1)
    assert list(SHARED_MEMORY_DIR.glob("slimrl-died-*")) == []
    resync.close()


def test_the_draft_model_gets_its_layers_in_rounds_of_its_own(threads):
    engine, models = ShardedEngine("engine 0", "a", 2), []
    load = engine.load_round

    class Drafting(Source):
        def layout(self):
            return {replace(s, mtp=s.name == "rows"): pieces for s, pieces in super().layout().items()}

    def kept(model):
        draft = model is EngineModel.draft
        return [
            {name: [region.box for region in each] for name, each in rank.items() if (name == "rows") is draft}
            for rank in engine.memory
        ]

    engine.kept = kept
    engine.load_round = lambda model, number, slot: (models.append(model), load(model, number, slot))

    def run(rank):
        settings = config(bucket_bytes=160, verify=VerifyMode.off)
        resync = session(Drafting(rank, random_weights(1)), [engine], settings, rank=rank, node="a", run_id="ipc")
        resync.run(1)
        resync.close()

    threads.run(run)
    assert engine.wrong(random_weights(1)) == []
    assert set(models) == set(EngineModel)
