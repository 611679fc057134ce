"""The ranks of an engine on two nodes, as threads of this process, receive buckets and load them."""

import base64
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from slimrl import device
from slimrl.data.protocols import BucketSpec, GroupSpec, TensorPart, TensorSpec
from slimrl.models.broadcast_group import BroadcastGroup, GroupError, serve_store
from slimrl.models.shared_segment import SHARED_MEMORY_DIR
from slimrl.rollout.bucket_loader import open_payload, received_payload, update

pytestmark = pytest.mark.skipif(device.device_type() == "cuda", reason="the receivers here take host memory")

RANKS, PER_NODE = 4, 2
BUCKET_BYTES = 64


class Model:
    def __init__(self):
        self.loaded = {}
        self.refuses = False

    def load_weights(self, tensors):
        if self.refuses:
            raise ValueError("refused")
        self.loaded |= {name: tensor.clone() for name, tensor in tensors}


class ThreadRank:
    """Implements EngineRanks."""

    def __init__(self, rank, barrier, values):
        self.rank, self.per_node, self._barrier, self._values = rank, PER_NODE, barrier, values

    def exchange(self, value):
        self._values[self.rank] = value
        self._barrier.wait(20)
        answers = list(self._values)
        self._barrier.wait(20)
        return answers


class Engine:
    def __init__(self):
        barrier, values = threading.Barrier(RANKS), [None] * RANKS
        self.ranks = [ThreadRank(rank, barrier, values) for rank in range(RANKS)]
        self.models = [Model() for _ in self.ranks]

    def tell(self, payload):
        """(success, message) of each rank."""
        value = pickle.loads(base64.b64decode(payload))
        with ThreadPoolExecutor(RANKS) as pool:
            return list(pool.map(lambda model, rank: update(model, value, rank), self.models, self.ranks))


def bucket_of(values):
    spec = TensorSpec(name="w", shape=tuple(values.shape), dtype="float32")
    return BucketSpec(
        parts=(TensorPart(spec=spec, start=0, stop=len(values), offset=0, nbytes=values.nbytes),), nbytes=values.nbytes
    )


def group_of(num_receivers, timeout_s=10.0, name="slimrl-test"):
    store = serve_store("127.0.0.1", num_receivers + 1, timeout_s)
    spec = GroupSpec(
        name=name, address="127.0.0.1", port=store.port, world_size=num_receivers + 1, backend="gloo",
        bucket_bytes=BUCKET_BYTES, timeout_s=timeout_s,
    )  # fmt: skip
    return spec, store


def send(group, values):
    group.broadcast(torch.tensor([values.nbytes]))
    group.broadcast(values.view(torch.uint8))


def own_segments():
    return {path.name for path in SHARED_MEMORY_DIR.glob(f"slimrl-received-*-{os.getpid()}-*")}


def test_one_rank_of_each_node_receives_and_all_load():
    engine = Engine()
    spec, store = group_of(2)
    assert engine.tell(open_payload(spec, 1)) == [(True, "Success")] * RANKS
    group = BroadcastGroup(spec, 0, store)
    for version in range(2):
        if version:
            assert engine.tell(open_payload(spec, 1)) == [(True, "Success")] * RANKS
        for number, rows in enumerate((6, 2, 9)):
            values = torch.randn(rows)
            send(group, values)
            told = engine.tell(received_payload(spec.name, number, bucket_of(values)))
            assert told == [(True, "Success")] * RANKS
            assert all(torch.equal(model.loaded["w"], values) for model in engine.models)
            assert own_segments() == set()
        group.broadcast(torch.zeros(1, dtype=torch.int64))
    group.drop()


def test_an_engine_maps_two_buffers_per_node_and_rank_however_many_buckets_of_whatever_sizes_come():
    before = mappings()
    engine = Engine()
    spec, store = group_of(2)
    group = None
    for _ in range(2):
        engine.tell(open_payload(spec, 1))
        group = group or BroadcastGroup(spec, 0, store)
        for number in range(8):
            values = torch.randn(2 * (number + 1))
            send(group, values)
            assert engine.tell(received_payload(spec.name, number, bucket_of(values)))[0] == (True, "Success")
        group.broadcast(torch.zeros(1, dtype=torch.int64))
    # The ranks are threads of one process here, so the receiver's own mappings are counted with its neighbour's.
    assert len(mappings() - before) == 2 * RANKS
    group.drop()


def mappings():
    """(addresses, file) of what this process maps of receivers' memory."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {(line.split()[0], line.split()[5]) for line in lines if "/slimrl-received-" in line}


def test_a_bucket_that_came_while_another_was_loaded_is_found_by_all_ranks():
    engine = Engine()
    spec, store = group_of(2)
    engine.tell(open_payload(spec, 1))
    group = BroadcastGroup(spec, 0, store)
    first, second = torch.randn(2), torch.randn(3)
    send(group, first)
    send(group, second)
    for number, values in enumerate((first, second)):
        told = engine.tell(received_payload(spec.name, number, bucket_of(values)))
        assert told == [(True, "Success")] * RANKS
        assert all(torch.equal(model.loaded["w"], values) for model in engine.models)
    group.drop()


def test_what_one_rank_cannot_load_is_told_by_all_of_them():
    engine = Engine()
    engine.models[2].refuses = True
    spec, store = group_of(2)
    engine.tell(open_payload(spec, 1))
    group = BroadcastGroup(spec, 0, store)
    values = torch.randn(3)
    send(group, values)
    told = engine.tell(received_payload(spec.name, 0, bucket_of(values)))
    assert told == [(False, "rank 2: ValueError: refused")] * RANKS
    group.drop()


def test_a_bucket_of_another_group_or_one_that_never_comes_is_an_error_in_bounded_time():
    engine = Engine()
    spec, store = group_of(2, timeout_s=1.0)
    engine.tell(open_payload(spec, 1))
    group = BroadcastGroup(spec, 0, store)
    for name, text in (("slimrl-other", "not in group slimrl-other"), (spec.name, "bucket 0 has not come within")):
        for success, message in engine.tell(received_payload(name, 0, bucket_of(torch.zeros(1)))):
            assert not success
            assert text in message
    group.drop()


def test_an_engine_whose_group_broke_joins_the_next_one():
    engine = Engine()
    spec, store = group_of(2, timeout_s=1.0, name="slimrl-first")
    engine.tell(open_payload(spec, 1))
    del store
    spec, store = group_of(2, name="slimrl-second")
    assert engine.tell(open_payload(spec, 1)) == [(True, "Success")] * RANKS
    group = BroadcastGroup(spec, 0, store)
    values = torch.randn(5)
    send(group, values)
    assert engine.tell(received_payload(spec.name, 0, bucket_of(values))) == [(True, "Success")] * RANKS
    group.drop()


def test_a_member_that_does_not_join_is_an_error_within_the_deadline():
    spec, store = group_of(1, timeout_s=0.5)
    with pytest.raises(GroupError, match="joining group slimrl-test"):
        BroadcastGroup(spec, 0, store)
