"""Device memory that processes share by a CUDA IPC handle, with stand-ins for what makes and opens the handle."""

import base64
import logging
import os
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing import reductions

from slimrl import device
from slimrl.config.schema import Recipe, RolloutConfig, TrainerConfig
from slimrl.ipc.allocator import forbid_expandable_segments
from slimrl.ipc.shared_buffer import CUDA_PREFIX, CudaBuffer, open_shared
from slimrl.rollout.servers.server import engine_environment
from slimrl.runtime.cluster.engine_actor import EngineActor
from slimrl.runtime.cluster.trainer_actor import TrainerActor

pytestmark = pytest.mark.skipif(device.device_type() == "cuda", reason="the handles here are stand-ins")

MADE_ON = 0
"""The number of the only GPU that the maker sees."""


@pytest.fixture
def opened(monkeypatch):
    """Arguments, in order, of each handle that was opened; handles are made as torch 2.14 makes them."""
    order = reductions.rebuild_cuda_tensor.__code__.co_varnames[: reductions.rebuild_cuda_tensor.__code__.co_argcount]
    calls = []

    def reduce_tensor(tensor):
        size, stride = tensor.size(), tensor.stride()
        handle = (b"handle", tensor.numel(), 0, False, b"counter", 8, b"event", True)
        return reductions.rebuild_cuda_tensor, (
            torch.Tensor, size, stride, 0, torch.UntypedStorage, torch.uint8, MADE_ON, *handle,
        )  # fmt: skip

    def rebuild(
        tensor_cls, tensor_size, tensor_stride, tensor_offset, storage_cls, dtype, storage_device, storage_handle,
        storage_size_bytes, storage_offset_bytes, requires_grad, ref_counter_handle, ref_counter_offset, event_handle,
        event_sync_required,
    ):  # fmt: skip
        given = locals()
        calls.append({name: given[name] for name in order})
        return torch.zeros(tensor_size, dtype=dtype)

    monkeypatch.setattr(reductions, "reduce_tensor", reduce_tensor)
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", rebuild)
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
        assert open_shared(segment).shape == (24,)
    assert [call["storage_device"] for call in opened] == [3, 5]
    for call in opened:
        assert (call["storage_handle"], call["storage_size_bytes"], call["event_handle"]) == (b"handle", 24, b"event")


def test_a_reader_opens_no_event_because_the_writer_waits_before_it_hands_over(monkeypatch, opened, synchronised):
    """An event belongs to a GPU that the reader may not see."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    buffer = CudaBuffer(24, torch.device("cpu"))
    assert synchronised == []
    segment = buffer.segment()
    assert synchronised == [1]
    open_shared(segment)
    assert opened[0]["event_sync_required"] is False
    assert pickle.loads(base64.b64decode(segment.removeprefix(CUDA_PREFIX)))["event_sync_required"] is False


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
    made = actor.__ray_metadata__.modified_class
    module = "slimrl.runtime.cluster." + ("trainer_actor" if actor is TrainerActor else "engine_actor")
    monkeypatch.setattr(f"{module}.capture_output", lambda path: None)
    monkeypatch.chdir(tmp_path)
    arguments = {
        TrainerActor: (recipe, tmp_path, tmp_path, 0, "a", 1),
        EngineActor: (recipe, tmp_path, tmp_path, 0, None, ()),
    }
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")
    object.__new__(made).__init__(*arguments[actor])
    server = engine_environment(recipe.rollout, cuda=True) if actor is EngineActor else {}
    assert "expandable_segments" not in "".join({**os.environ, **server}.values())
