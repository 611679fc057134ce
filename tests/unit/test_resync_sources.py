"""Which ranks send what from where it lies: those of the sender's node what they hold whole, each tensor once."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from thread_meeting import Meeting

from slimrl import device
from slimrl.config.schema import TransportName
from slimrl.data.protocols import EnginePlace, SourcePiece, SourceTensor, TensorSpec
from slimrl.resync import gather
from slimrl.resync.plan import plan_resync

pytestmark = pytest.mark.skipif(device.device_type() == "cuda", reason="nothing is sent in place from a GPU")

NODES = ("a", "a", "b", "b")
HELD = {
    "everywhere": (0, 1, 2, 3),
    "expert 0": (0,),
    "expert 1": (1,),
    "expert 2": (2,),
    "expert 3": (3,),
    "experts of both nodes": (1, 3),
    "small": (1,),
    "turned": (1,),
}
SHAPE, BUCKET_BYTES = (4, 5), 200


class ThreadRanks:
    """The part of Ranks that gathering needs, for ranks that are threads of this process."""

    nodes = NODES

    def __init__(self, rank, meeting):
        self.rank, self._meeting = rank, meeting

    def gather_objects(self, value):
        return self._meeting.exchange(self.rank, value)

    def meet_on_node(self):
        """The tests look at what stays where it lies."""


class NoExchange:
    def __init__(self, *_):
        pass

    def run(self, *_):
        pass

    def close(self):
        pass


class Held:
    """The part of WeightSource that gathering needs."""

    def __init__(self, rank):
        self._rank = rank

    def groups(self, name):
        assert self._rank in HELD[name]
        if name == "turned":
            return torch.zeros(5, 4).T[None]
        return torch.full((1, 1) if name == "small" else (1, *SHAPE), float(self._rank))


@pytest.mark.parametrize(("in_place_bytes", "sources"), [(80, [0, 1]), (None, [0])])
def test_each_large_tensor_of_the_sender_s_node_has_one_source(monkeypatch, in_place_bytes, sources):
    monkeypatch.setattr(gather, "Exchange", NoExchange)
    tensors = []
    for name, holders in HELD.items():
        shape = (1,) if name == "small" else SHAPE
        region = tuple(slice(0, size) for size in shape)
        spec = TensorSpec(name=name, shape=shape, dtype="float32")
        tensors.append(SourceTensor(spec=spec, pieces=(SourcePiece(region=region, holders=holders),)))
    engine = EnginePlace(name="engine 0", nodes=("c",))
    plan = plan_resync(tensors, NODES, [engine], transport=TransportName.collective, bucket_bytes=BUCKET_BYTES)
    meeting = Meeting(len(NODES))

    def gathered(rank):
        gatherer = gather.Gatherer(
            plan, Held(rank), ThreadRanks(rank, meeting), num_stages=2, in_place_bytes=in_place_bytes,
            run_id="sources", timeout_s=5,
        )  # fmt: skip
        live = [gatherer.gather(number, number % 2) for number in range(len(plan.buckets))]
        meeting.wait()
        assert gatherer.sources == sources
        gatherer.close()
        return live

    with ThreadPoolExecutor(len(NODES)) as pool:
        live = list(pool.map(gathered, range(len(NODES))))
    named, told = {}, {}
    for number, bucket in enumerate(plan.buckets):
        names = {part.offset: part.spec.name for part in bucket.gathered.parts}
        for rank, buckets in enumerate(live):
            assert buckets[number].sources == live[0][number].sources
            for offset, value in buckets[number].own.items():
                assert value.view(torch.float32).eq(rank).all()
                named.setdefault(names[offset], []).append(rank)
        told |= {names[offset]: [source] for offset, source in live[0][number].sources.items()}
    large = {"everywhere": [0], "expert 0": [0], "expert 1": [1], "experts of both nodes": [1]}
    assert named == told == ({} if in_place_bytes is None else large)
