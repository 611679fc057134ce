"""Resyncs of a trainer of several ranks on two nodes, all threads of this process, with engines that live in it too."""

import os
import threading
import time

import pytest
import torch
from resync_engines import Engine, MemoryTransport, config, session
from thread_dist import ThreadDist

from slimrl import device
from slimrl.data.engine import EngineError
from slimrl.data.model_weights import EnginePlace, SourcePiece, TensorSpec
from slimrl.quantization.fp8 import BlockFp8, quantize
from slimrl.resync import exchange, pipeline, ranks
from slimrl.resync.ipc import rank_rounds
from slimrl.resync.ipc.shared_buffer import SHARED_MEMORY_DIR
from slimrl.resync.ranks import Ranks
from slimrl.resync.report import ResyncError
from slimrl.resync.transform import Quantize

pytestmark = pytest.mark.skipif(device.device_type() == "cuda", reason="the engines here map host memory")

NODES = "aabb"
SHAPES = {
    "rows": (8, 4),
    "columns": (3, 4),
    "halves": (3, 4),
    "everywhere": (5,),
    "on last": (6, 2),
    "on second": (7, 3),
}
REGIONS = {
    "rows": [((2 * rank, 2 * rank + 2, 0, 4), (rank,)) for rank in range(4)],
    "columns": [((0, 3, 0, 2), (0, 2)), ((0, 3, 2, 4), (1, 3))],
    "halves": [((0, 3, 0, 2), (1,)), ((0, 3, 2, 4), (2,))],
    "everywhere": [((0, 5), (0, 1, 2, 3))],
    "on last": [((0, 6, 0, 2), (3,))],
    "on second": [((0, 7, 0, 3), (1,))],
}
"""Tensor -> its pieces: first and end of every dimension, and the ranks that hold it."""


def region_of(edges):
    return tuple(slice(*pair) for pair in zip(edges[::2], edges[1::2], strict=True))


class Source:
    """What one rank holds of the weights."""

    def __init__(self, rank, weights):
        self._rank, self.weights = rank, weights

    def layout(self):
        return {
            TensorSpec(name=name, shape=shape, dtype="float32"): tuple(
                SourcePiece(region=region_of(edges), holders=holders) for edges, holders in REGIONS[name]
            )
            for name, shape in SHAPES.items()
        }

    def groups(self, name):
        # Those that lead no node are late.
        time.sleep(0.002 * (self._rank % 2))
        (edges,) = [edges for edges, holders in REGIONS[name] if self._rank in holders]
        return self.weights[name][region_of(edges)].contiguous()[None]


def random_weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def engine_on(*nodes, kind=Engine, keeps=None):
    engine = kind(f"engine on {nodes[0]}", keeps=keeps or random_weights())
    engine.place = EnginePlace(name=engine.name, nodes=nodes)
    return engine


@pytest.fixture
def threads(monkeypatch):
    threads = ThreadDist(len(NODES))
    for module in (ranks, exchange, rank_rounds):
        monkeypatch.setattr(module, "dist", threads)
    # So that all ranks of a node have some of the few bytes here.
    monkeypatch.setattr(exchange, "CUT_BYTES", 1)
    yield threads
    assert threads.left == threads.made


def resynced(threads, engines, settings, versions=((1, 0),), *, nodes=NODES, weights=random_weights, **options):
    """By rank, what each gets of every (version, seed of its weights): a report, None, or an error."""

    def run(rank):
        own = {name: value(rank) for name, value in options.items()}
        resync = session(Source(rank, weights()), engines, settings, rank=rank, node=nodes[rank], run_id="ranks", **own)
        results = []
        try:
            for version, seed in versions:
                resync._source.weights = weights(seed)
                try:
                    results.append(resync.run(version))
                except ResyncError as error:
                    results.append(error)
        finally:
            resync.close()
        return results

    return threads.run(run)


def assert_loaded(engine, weights):
    """Bit for bit."""
    assert engine.loaded.keys() == weights.keys()
    for name, value in weights.items():
        assert engine.loaded[name].dtype is value.dtype
        assert torch.equal(engine.loaded[name].view(torch.uint8), value.view(torch.uint8)), name


@pytest.mark.parametrize("transport", [None, MemoryTransport])
@pytest.mark.parametrize(
    ("nodes", "engine_nodes"), [("aabb", "ab"), ("aabb", "a"), ("aabb", "b"), ("abcd", "abcd"), ("abcd", "bd")]
)
def test_engines_on_the_trainer_s_nodes_get_what_lies_on_all_of_its_ranks(threads, nodes, engine_nodes, transport):
    engines = [engine_on(node) for node in engine_nodes]
    options = {"transport": lambda _: transport()} if transport else {}
    results = resynced(threads, engines, config(bucket_bytes=128), ((1, 1), (5, 2)), nodes=nodes, **options)
    for engine in engines:
        assert_loaded(engine, random_weights(2))
        assert (engine.version, engine.calls.count("resume")) == (5, 2)
    assert results[1:] == [[None, None]] * 3
    for report in results[0]:
        assert (report.mismatching, report.failed_engines) == ((), {})
        assert report.verified_tensors == len(engines) * len(SHAPES)
        assert report.bytes == 4 * sum(torch.Size(shape).numel() for shape in SHAPES.values())


def quantised(block):
    """The weights as engines keep them in block FP8."""
    codes, scales = quantize(random_weights()["rows"], block)
    return random_weights() | {"rows": codes, "rows_scale_inv": scales}


@pytest.mark.parametrize("transport", [None, MemoryTransport])
@pytest.mark.parametrize("block", [(4, 4), (2, 4)])
@pytest.mark.parametrize("nodes", ["aabb", "aaaa"])
def test_what_is_quantised_on_the_way_is_that_of_the_whole_matrices(threads, nodes, block, transport):
    class Slow(Quantize):
        """The node's other ranks are done before."""

        def apply(self, *given):
            time.sleep(0.05)
            super().apply(*given)

    engines = [engine_on(node, keeps=quantised(block)) for node in sorted(set(nodes))]
    # Ranks have two rows each: tiles of two are quantised before they travel.
    transform = Slow(BlockFp8(block=block), ["rows"])
    settings = config(bucket_bytes=200)
    options = {"transport": lambda _: transport()} if transport else {}
    results = resynced(threads, engines, settings, nodes=nodes, transform=lambda _: transform, **options)
    assert results[0][0].mismatching == ()
    for engine in engines:
        assert_loaded(engine, quantised(block))


def test_what_was_gathered_wrongly_is_named_once_and_no_engine_resumes(threads, monkeypatch):
    original = Quantize.apply

    def spoils(self, bucket, gathered, *given):
        for part in bucket.gathered:
            if part.spec.name == "rows":
                part.view(gathered)[0, 0] += 1
        original(self, bucket, gathered, *given)

    monkeypatch.setattr(Quantize, "apply", spoils)
    engines = [engine_on("a"), engine_on("b")]
    transform = Quantize(BlockFp8(block=(4, 4)), ["rows"])
    results = resynced(
        threads, engines, config(bucket_bytes=1000), transform=lambda _: transform,
        transport=lambda _: MemoryTransport(),
    )  # fmt: skip
    # Engines have what was made of it, as it was hashed then.
    assert results[0][0].mismatching == ("gathering: rows",)
    assert not any("resume" in engine.calls for engine in engines)


def test_a_matrix_that_cannot_be_quantised_fails_the_version_on_every_rank_and_engines_stay_paused(threads):
    def weights(seed=0):
        spoilt = random_weights(seed)
        spoilt["rows"][7, 3] = float("nan")
        return spoilt

    engines = [engine_on(node, keeps=quantised((4, 4))) for node in "ab"]
    transform = Quantize(BlockFp8(block=(4, 4)), ["rows"])
    results = resynced(threads, engines, config(bucket_bytes=1000), weights=weights, transform=lambda _: transform)
    for (error,) in results:
        assert "resync of version 1 failed quantising: rows: " in str(error)
    assert [engine.calls for engine in engines] == [["pause", "begin", "kept", "map"]] * 2


@pytest.mark.parametrize("transport", [None, MemoryTransport])
def test_nodes_that_cannot_reach_each_other_keep_no_memory(threads, monkeypatch, transport):
    all_ranks = threading.Barrier(len(NODES))

    def unreachable(*given):
        all_ranks.wait(10)
        raise ranks.RankError("no route")

    monkeypatch.setattr(pipeline, "Exchange", unreachable)
    monkeypatch.setattr(rank_rounds.RankRounds, "_connect", unreachable)
    transport = {"transport": lambda _: MemoryTransport()} if transport else {}
    results = resynced(threads, [engine_on("a"), engine_on("b")], config(), **transport)
    assert [str(error) for (error,) in results] == ["resync of version 1 failed: no route"] * 4
    assert list(SHARED_MEMORY_DIR.glob(f"slimrl-ranks-{os.getpid()}-*")) == []


def test_a_tensor_that_arrived_wrong_on_another_node_is_in_the_report_and_nobody_resumes(threads):
    class Corrupting(Engine):
        def end_update(self):
            super().end_update()
            self.loaded["columns"][2, 3] += 1

    engines = [engine_on("a"), engine_on("b", kind=Corrupting)]
    results = resynced(threads, engines, config())
    assert results[0][0].mismatching == ("engine on b: columns",)
    assert not any("resume" in engine.calls for engine in engines)


def test_an_engine_that_refuses_a_bucket_on_one_node_has_all_start_again(threads):
    engines = [engine_on("a"), engine_on("b")]
    engines[1].fails_at = ("load", 2)
    results = resynced(threads, engines, config())
    assert (results[0][0].mismatching, results[0][0].failed_engines) == ((), {})
    for engine in engines:
        assert_loaded(engine, random_weights())
        assert (engine.calls.count("pause"), engine.calls.count("resume")) == (2, 1)


def test_an_engine_of_another_node_that_is_taken_out_is_in_the_report_and_the_others_serve(threads):
    class Refusing(Engine):
        def load_round(self, model, number, slot):
            raise EngineError(f"{self.name}: refused")

    engines = [engine_on("a"), engine_on("b", kind=Refusing)]
    results = resynced(threads, engines, config())
    report = results[0][0]
    assert report.failed_engines == {"engine on b": "engine on b: refused"}
    assert report.verified_tensors == len(SHAPES)
    assert_loaded(engines[0], random_weights())
    assert "resume" in engines[0].calls
    assert "resume" not in engines[1].calls


def test_ranks_tell_each_other_values_and_let_go_of_their_groups(threads):
    def talk(rank):
        own = Ranks(NODES[rank], 5)
        values = torch.tensor([rank, 10])
        own.add(values)
        told = own.nodes, own.agree(rank % 3), own.gather_objects(rank * rank), values.tolist()
        own.node_barrier()
        own.close()
        own.close()
        return told

    assert threads.run(talk) == [(tuple(NODES), 2, [0, 1, 4, 9], [6, 40])] * 4


def test_without_other_ranks_a_rank_agrees_with_itself():
    alone = Ranks("a", 5)
    values = torch.tensor([3])
    alone.add(values)
    alone.node_barrier()
    assert (alone.agree(2), alone.gather_objects("x"), values.tolist(), alone.nodes) == (2, ["x"], [3], ("a",))
    alone.close()


def test_a_rank_that_is_gone_is_an_error_of_the_resync(monkeypatch):
    def gone(*_, **__):
        raise RuntimeError("Connection closed by peer")

    def talk(rank):
        own = Ranks(NODES[rank], 5)
        for name in ("all_reduce", "all_gather_object", "barrier"):
            monkeypatch.setattr(threads, name, gone)
        for call in (lambda: own.agree(0), lambda: own.gather_objects(0), own.node_barrier, lambda: own.add(None)):
            with pytest.raises(ranks.RankError, match="a rank of the trainer died or is late: Connection closed"):
                call()

    threads = ThreadDist(1)
    monkeypatch.setattr(ranks, "dist", threads)
    threads.run(talk)
