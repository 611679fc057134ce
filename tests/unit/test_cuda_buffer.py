"""Device memory that processes share by a CUDA IPC handle, with stand-ins for what makes and opens the handle."""

import base64
import json
import logging
import os
import pickle
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing import reductions

from slimrl import device
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.config.schema.trainer import TrainerConfig
from slimrl.engines.servers.server import engine_environment
from slimrl.resync.ipc.allocator import forbid_expandable_segments
from slimrl.resync.ipc.shared_buffer import CUDA_PREFIX, CudaBuffer, open_shared
from slimrl.runtime.cluster.engine_actor import EngineActor
from slimrl.runtime.cluster.trainer_actor import TrainerActor

pytestmark = pytest.mark.skipif(device.device_type() == "cuda", reason="the handles here are stand-ins")

MADE_ON = 0
"""The number of the only GPU that the maker sees."""


@pytest.fixture
def opened(monkeypatch):
    """Arguments of each handle that was opened, by name; handles are made as torch 2.14 makes them."""
    calls = []

    def share(storage):
        return MADE_ON, b"handle", storage.nbytes(), 0, b"counter", 8, b"event", True

    def open_storage(device, handle, size_bytes, offset_bytes, counter, counter_offset, event, event_sync_required):
        calls.append(locals())
        return torch.UntypedStorage(size_bytes)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", share)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", staticmethod(open_storage))
    return calls


@pytest.fixture
def synchronised(monkeypatch):
    times = []
    stream = SimpleNamespace(synchronize=lambda: times.append(1))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream)
    return times


def test_a_handle_is_opened_on_the_gpu_on_which_the_opener_computes(monkeypatch, opened, synchronised):
    segment = CudaBuffer(24, torch.device("cpu")).segment()
    for gpu in (3, 5):
        monkeypatch.setattr(torch.cuda, "current_device", lambda gpu=gpu: gpu)
        memory = open_shared(segment)
        assert (memory.shape, memory.dtype) == ((24,), torch.uint8)
    assert [call["device"] for call in opened] == [3, 5]
    for call in opened:
        assert (call["handle"], call["size_bytes"], call["offset_bytes"]) == (b"handle", 24, 0)
        assert (call["counter"], call["counter_offset"], call["event"]) == (b"counter", 8, b"event")


def test_a_reader_opens_no_event_because_the_writer_waits_before_it_hands_over(monkeypatch, opened, synchronised):
    """An event belongs to a GPU that the reader may not see."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    buffer = CudaBuffer(24, torch.device("cpu"))
    assert synchronised == []
    segment = buffer.segment()
    assert synchronised == [1]
    open_shared(segment)
    assert opened[0]["event_sync_required"] is False


class Touches:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("has_gpu", [False, True], ids=["cpu", "gpu"])
def test_a_pickle_in_place_of_a_handle_runs_no_code(monkeypatch, opened, tmp_path, has_gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    made = tmp_path / "made"
    content = pickle.dumps((0, Touches(made)))
    pickle.loads(content)
    made.unlink()  # It does run where it is unpickled.
    with pytest.raises(ValueError, match="Expecting value" if has_gpu else "has no GPU"):
        open_shared(CUDA_PREFIX + base64.b64encode(content).decode())
    assert not made.exists()
    assert opened == []


def test_without_a_gpu_no_handle_is_opened(monkeypatch, opened, synchronised):
    segment = CudaBuffer(24, torch.device("cpu")).segment()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="has no GPU"):
        open_shared(segment)
    assert opened == []


@pytest.mark.parametrize(
    "change",
    [
        {"size_bytes": -1},
        {"size_bytes": "24"},
        {"size_bytes": True},
        {"offset_bytes": 0.5},
        {"handle": 7},
        {"handle": "n/o=="},
        {"ref_counter_handle": None},
        {"event_sync_required": 1},
        {"more": 1},
    ],
    ids=repr,
)
def test_a_handle_of_other_types_is_refused(monkeypatch, opened, synchronised, change):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    segment = CudaBuffer(24, torch.device("cpu")).segment()
    plain = json.loads(segment.removeprefix(CUDA_PREFIX))
    with pytest.raises(ValueError, match=r"not a handle|padding"):
        open_shared(CUDA_PREFIX + json.dumps(plain | change))
    assert opened == []


def test_a_process_of_sglang_makes_and_opens_handles_as_others_do(monkeypatch, opened, synchronised):
    """It replaces torch's functions for this before an update, by ones that take and give the GPU's UUID."""
    originals = {name: getattr(reductions, name) for name in ("reduce_tensor", "rebuild_cuda_tensor")}
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    outside = CudaBuffer(24, torch.device("cpu")).segment()
    what_it_needs = SimpleNamespace(is_musa=lambda: False, is_npu=lambda: False, torch_release=(2, 14))
    monkeypatch.setitem(sys.modules, "sglang.srt.utils.common", what_it_needs)
    file = Path(find_spec("sglang").submodule_search_locations[0]) / "srt/utils/patch_torch.py"
    runpy.run_path(str(file))["monkey_patch_torch_reductions"]()
    try:
        assert reductions.rebuild_cuda_tensor is not originals["rebuild_cuda_tensor"]
        assert CudaBuffer(24, torch.device("cpu")).segment() == outside
        assert open_shared(outside).shape == (24,)
    finally:
        for name, original in originals.items():
            setattr(reductions, name, original)
            delattr(reductions, f"_{name}_original")
        reductions.init_reductions()
    assert [call["device"] for call in opened] == [5]


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ("expandable_segments:True", None),
        ("max_split_size_mb:512,expandable_segments:True", "max_split_size_mb:512"),
        (" expandable_segments : true ,max_split_size_mb:512", "max_split_size_mb:512"),
        (
            "roundup_power2_divisions:[256:1,512:2],expandable_segments:True,backend:native",
            "roundup_power2_divisions:[256:1,512:2],backend:native",
        ),
        ("expandable_segments:False", "expandable_segments:False"),
        ("max_split_size_mb:512", "max_split_size_mb:512"),
        (None, None),
    ],
)
@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_inherited_expandable_segments_are_removed_and_other_settings_kept(caplog, name, given, left):
    environment = {} if given is None else {name: given}
    with caplog.at_level(logging.WARNING):
        forbid_expandable_segments(environment)
    assert environment == ({} if left is None else {name: left})
    assert (name in caplog.text) is (given != left)


@pytest.mark.parametrize("actor", [TrainerActor, EngineActor])
def test_actors_remove_them_from_their_environment_and_the_recipe_s_at_the_start(monkeypatch, tmp_path, actor):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    given = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    recipe = Recipe(trainer=TrainerConfig(env=given), rollout=RolloutConfig(env=dict(given)))
    made = actor
    module = "slimrl.runtime.cluster." + ("trainer_actor" if actor is TrainerActor else "engine_actor")
    monkeypatch.setattr(f"{module}.capture_output", lambda path: None)
    monkeypatch.chdir(tmp_path)
    arguments = {
        TrainerActor: (recipe, tmp_path, tmp_path, 0, "a", 1),
        EngineActor: (recipe, None, tmp_path, tmp_path, 0, None, ()),
    }
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")
    object.__new__(made).__init__(*arguments[actor])
    precision = recipe.trainer.precision
    server = engine_environment(recipe.rollout, precision=precision, cuda=True) if actor is EngineActor else {}
    assert "expandable_segments" not in "".join({**os.environ, **server}.values())
