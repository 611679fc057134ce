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
from slimrl.engines.plugin.weight_updates import around_end_update, load_payload, map_payload, update
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


ROUNDS = {
    EngineModel.target: [
        [placed(512, Entry("a", "float32", ((2, 3), (0, 3))), Entry("s", "float32", ()))],
        [],
        [placed(0, Entry("a", "float32", ((3, 4), (0, 3))))],
    ]
}


def one_round(*messages):
    return plain_loads({EngineModel.target: [list(messages)]})


def load(number, slot):
    return told(load_payload(EngineModel.target, slot, number))


def test_rounds_are_copied_from_their_slots_to_every_place(slots, regions):
    model, ranks = SimpleNamespace(), OnlyRank()
    segments = {SOURCE: [buffer.segment() for buffer in slots]}
    assert update(model, told(map_payload(plain_loads(ROUNDS), segments)), ranks) == (True, "Success")
    first, second = (buffer.tensor.view(torch.float32) for buffer in slots)
    second[128:132] = torch.tensor([1.0, 2.0, 3.0, 9.0])
    assert update(model, load(0, 1), ranks) == (True, "Success")
    second.fill_(-1)
    first[:3] = torch.tensor([4.0, 5.0, 6.0])
    # The fourth is one that only others have.
    for number, slot in ((1, 1), (2, 0), (3, 1)):
        assert update(model, load(number, slot), ranks) == (True, "Success")
    assert [each.tolist() for each in regions["a"]] == [[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]] * 2
    assert regions["s"][0] == 9
    assert model.slimrl_placed_weights is True


def test_where_parameters_lie_is_found_anew_in_each_update(slots, regions):
    model, ranks = SimpleNamespace(), OnlyRank()
    updater = SimpleNamespace(get_model=lambda: model)
    segments = {SOURCE: [buffer.segment() for buffer in slots]}
    update(model, told(map_payload(plain_loads(ROUNDS), segments)), ranks)
    for count in (1, 2):
        for number in (0, 2):
            update(model, load(number, 0), ranks)
        assert len(regions["found"]) == count
        around_end_update(lambda updater, *, run_post_load: None, updater, run_post_load=False)
        assert vars(model) == {}


def test_the_copies_of_a_round_have_run_when_the_trainer_is_answered(slots, regions, monkeypatch):
    """Then it fills the slot again."""
    model, ranks, order = SimpleNamespace(), OnlyRank(), []
    segments = {SOURCE: [buffer.segment() for buffer in slots]}
    update(model, told(map_payload(plain_loads(ROUNDS), segments)), ranks)
    monkeypatch.setattr(device, "finish_queued_work", lambda: order.append("finished"))
    monkeypatch.setattr(ranks, "exchange", lambda value: order.append("answered") or [value], raising=False)
    update(model, load(0, 0), ranks)
    assert order == ["finished", "answered"]


def test_what_cannot_be_loaded_is_told_and_ends_no_engine(slots, regions):
    model, ranks = SimpleNamespace(), OnlyRank()
    assert update(model, load(0, 0), ranks) == (
        False, "rank 0: ValueError: this process has no plan of the trainer's slots",
    )  # fmt: skip
    segments = {SOURCE: [buffer.segment() for buffer in slots]}
    update(model, told(map_payload(one_round(placed(0, Entry("b", "float32", ()))), segments)), ranks)
    assert update(model, load(0, 0), ranks) == (False, "rank 0: ValueError: this rank does not keep [] of b")
    assert update(model, load(0, 2), ranks) == (False, "rank 0: IndexError: list index out of range")


def test_a_plan_that_cannot_be_followed_leaves_the_one_before(slots, regions):
    model, ranks = SimpleNamespace(), OnlyRank()
    segments = {SOURCE: [buffer.segment() for buffer in slots]}
    update(model, told(map_payload(plain_loads(ROUNDS), segments)), ranks)
    success, message = update(model, told(map_payload(plain_loads(ROUNDS), {SOURCE: ["slimrl-gone-1-1"] * 2})), ranks)
    assert not success
    assert message.startswith("rank 0: FileNotFoundError: ")
    slots[0].tensor.view(torch.float32)[128:132] = torch.tensor([1.0, 2.0, 3.0, 9.0])
    assert update(model, load(0, 0), ranks) == (True, "Success")
    assert regions["s"][0] == 9


def test_slots_of_other_nodes_are_not_mapped(slots, regions):
    segments = {SOURCE: [buffer.segment() for buffer in slots], 8: ["slimrl-on_another_node-1-1"] * 2}
    payload = told(map_payload(plain_loads(ROUNDS), segments))
    assert update(SimpleNamespace(), payload, OnlyRank()) == (True, "Success")


def test_a_plan_replaces_the_one_before(slots, regions):
    model, ranks = SimpleNamespace(), OnlyRank()
    segments = {SOURCE: [buffer.segment() for buffer in slots]}
    for start in (0, 128):
        entry = Entry("s", "float32", ())
        update(model, told(map_payload(one_round(placed(4 * start, entry)), segments)), ranks)
        slots[0].tensor.view(torch.float32)[start] = 1.0 + start
        update(model, load(0, 0), ranks)
        assert regions["s"][0] == 1 + start


@pytest.mark.parametrize("segment", ["../../etc/hostname", "cuda-ipc:gAR9lC4="])
def test_a_segment_that_is_no_buffer_is_told_and_ends_no_engine(regions, segment):
    payload = told(map_payload(plain_loads(ROUNDS), {SOURCE: [segment] * 2}))
    success, message = update(SimpleNamespace(), payload, OnlyRank())
    assert not success
    assert message.startswith("rank 0: ValueError")
