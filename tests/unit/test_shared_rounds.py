"""An engine's end of the `ipc` transport: what it is told, what it copies from shared memory, and what it refuses."""

import base64
import pickle
from types import SimpleNamespace

import pytest
import torch
from engine_ranks import OnlyRank

from slimrl import device
from slimrl.data.model_weights import EngineModel
from slimrl.data.peer_messages import Entry, Message, Placed
from slimrl.engines.plugin import kept_tensors
from slimrl.engines.plugin.kept_tensors import KeptRegion
from slimrl.engines.plugin.shared_rounds import plain_loads
from slimrl.engines.plugin.weight_updates import load_payload, map_payload, update
from slimrl.resync.ipc import shared_buffer

pytestmark = pytest.mark.skipif(device.device_type() == "cuda", reason="the slots here are files in /dev/shm")

SOURCE = 7
"""Trainer rank in whose slots the messages lie"""


def told(payload: str) -> dict:
    return pickle.loads(base64.b64decode(payload))


@pytest.fixture
def slots():
    buffers = [shared_buffer.FileBuffer(4096, "test_shared_rounds") for _ in range(2)]
    yield buffers
    for buffer in buffers:
        buffer.close()


@pytest.fixture
def regions(monkeypatch):
    """The lower two rows of `a`, twice, and a scalar, as a rank keeps them."""
    memory = {"a": [torch.zeros(2, 3), torch.zeros(2, 3)], "s": [torch.zeros(())]}
    found = []

    def kept_regions(model):
        found.append(model)
        boxes = {"a": ((2, 4), (0, 3)), "s": ()}
        return {name: [KeptRegion(box, each) for each in memory[name]] for name, box in boxes.items()}

    monkeypatch.setattr(kept_tensors, "kept_regions", kept_regions)
    return memory | {"found": found}


def placed(offset, *entries):
    return Placed(Message(source=SOURCE, target=0, ranks=(0,), entries=entries, nbytes=0), offset)


ROUNDS = [
    [placed(512, Entry("a", "float32", ((2, 3), (0, 3))), Entry("s", "float32", ()))],
    [],
    [placed(0, Entry("a", "float32", ((3, 4), (0, 3))))],
]


def test_rounds_are_copied_from_the_slot_of_their_parity_to_every_place(slots, regions):
    model, ranks = SimpleNamespace(), OnlyRank()
    segments = {SOURCE: [buffer.segment() for buffer in slots]}
    assert update(model, told(map_payload(plain_loads(ROUNDS), segments)), ranks) == (True, "Success")
    first = slots[0].tensor.view(torch.float32)
    first[128:132] = torch.tensor([1.0, 2.0, 3.0, 9.0])
    assert update(model, told(load_payload(EngineModel.target, 5, 0)), ranks) == (True, "Success")
    first[:3] = torch.tensor([4.0, 5.0, 6.0])
    slots[1].tensor.fill_(255)
    for number in (1, 2):
        assert update(model, told(load_payload(EngineModel.target, 5, number)), ranks)[0]
    assert [each.tolist() for each in regions["a"]] == [[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]] * 2
    assert regions["s"][0] == 9
    assert model.slimrl_placed_weights is True
    # Where a parameter lies is found anew for each version.
    assert len(regions["found"]) == 1
    update(model, told(load_payload(EngineModel.target, 6, 0)), ranks)
    assert len(regions["found"]) == 2


def test_what_cannot_be_loaded_is_told_and_ends_no_engine(slots, regions):
    model, ranks = SimpleNamespace(), OnlyRank()
    load = told(load_payload(EngineModel.target, 5, 0))
    assert update(model, load, ranks) == (False, "rank 0: ValueError: this process has no plan of the trainer's slots")
    segments = {SOURCE: [buffer.segment() for buffer in slots]}
    update(model, told(map_payload(plain_loads([[placed(0, Entry("b", "float32", ()))]]), segments)), ranks)
    assert update(model, load, ranks) == (False, "rank 0: ValueError: this rank does not keep [] of b")
    for buffer in slots:
        buffer.close()
    update(model, told(map_payload(plain_loads(ROUNDS), segments)), ranks)
    success, message = update(model, load, ranks)
    assert not success
    assert message.startswith("rank 0: FileNotFoundError: ")


def test_a_plan_replaces_the_one_before(slots, regions):
    model, ranks = SimpleNamespace(), OnlyRank()
    for start in (0, 128):
        segments = {SOURCE: [buffer.segment() for buffer in slots]}
        entry = Entry("s", "float32", ())
        update(model, told(map_payload(plain_loads([[placed(4 * start, entry)]]), segments)), ranks)
        slots[0].tensor.view(torch.float32)[start] = 1.0 + start
        update(model, told(load_payload(EngineModel.target, start, 0)), ranks)
        assert regions["s"][0] == 1 + start


@pytest.mark.parametrize("segment", ["../../etc/hostname", "cuda-ipc:gAR9lC4="])
def test_a_segment_that_is_no_buffer_is_told_and_ends_no_engine(regions, segment):
    model, ranks = SimpleNamespace(), OnlyRank()
    update(model, told(map_payload(plain_loads(ROUNDS), {SOURCE: [segment] * 2})), ranks)
    success, message = update(model, told(load_payload(EngineModel.target, 5, 0)), ranks)
    assert not success
    assert message.startswith("rank 0: ValueError")
