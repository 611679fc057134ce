"""A checkpoint that somebody else made is data: what its pickles name is not run."""

import argparse
import os
import pickle
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from slimrl.checkpoints.torch_dist import safe_pickle
from slimrl.checkpoints.torch_dist.metadata import COMMON_KEY, COMMON_NAME, content_metadata
from slimrl.checkpoints.torch_dist.safe_pickle import METADATA_NAME, read_metadata, without_code
from slimrl.trainer.checkpointing import checkpoint


class Runs:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def write_checkpoint(folder: Path, common: Any, **more: Any) -> None:
    """A folder with a common state, as megatron-core writes it."""
    folder.mkdir()
    torch.save([common], folder / "__0_0.distcp")
    place = _StorageInfo("__0_0.distcp", 0, (folder / "__0_0.distcp").stat().st_size)
    metadata = Metadata(
        state_dict_metadata={COMMON_KEY: BytesStorageMetadata()},
        storage_data={MetadataIndex(COMMON_KEY): place},
        storage_meta=StorageMeta(checkpoint_id=folder),
        **more,
    )
    (folder / METADATA_NAME).write_bytes(pickle.dumps(metadata))
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')


@pytest.mark.parametrize("where", ["metadata", "inside", "state_dict", "common", "common.pt"])
def test_code_in_a_checkpoint_is_refused_by_its_name_and_not_run(tmp_path: Path, where: str):
    made, folder = tmp_path / "made", tmp_path / "checkpoint"
    common = {"content_metadata": {"x": Runs(made) if where == "common" else 1}}
    write_checkpoint(folder, common, planner_data=Runs(made) if where == "inside" else None)
    if where == "metadata":
        (folder / METADATA_NAME).write_bytes(pickle.dumps(Runs(made)))
    if where == "state_dict":
        (folder / METADATA_NAME).write_bytes(pickle.dumps({"a": Runs(made)}, protocol=2))
    if where == "common.pt":
        torch.save({"content_metadata": Runs(made)}, folder / COMMON_NAME)
    with pytest.raises(ValueError, match=r"it names posix\.mkdir, which no checkpoint needs and which may run code"):
        content_metadata(folder, read_metadata(folder))
    assert not made.exists()


def test_megatrons_arguments_and_plain_values_are_read(tmp_path: Path):
    arguments = argparse.Namespace(num_layers=2, params_dtype=torch.bfloat16)
    content = {"singleton_local_shards": True, "arguments": arguments, "shape": torch.Size([2]), "t": torch.ones(2)}
    write_checkpoint(tmp_path / "checkpoint", {"content_metadata": content})
    read = content_metadata(tmp_path / "checkpoint", read_metadata(tmp_path / "checkpoint"))
    assert read["arguments"] == arguments
    assert read["t"].tolist() == [1.0, 1.0]


def test_another_pickle_is_no_metadata(tmp_path: Path):
    for content in (pickle.dumps({"a": 1}), b"", b"\x80\x05"):
        (tmp_path / METADATA_NAME).write_bytes(content)
        with pytest.raises(ValueError, match=r"\.metadata: cannot be read"):
            read_metadata(tmp_path)


def test_torchs_own_loading_refuses_code_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made, folder = tmp_path / "made", tmp_path / "checkpoint"
    write_checkpoint(folder, {})
    torch.save(Runs(made), tmp_path / "object")
    with pytest.raises(ValueError, match=r"checkpoint: it names posix\.mkdir"), without_code(folder):
        torch.load(tmp_path / "object", weights_only=False)
    assert not made.exists()
    torch.load(tmp_path / "object", weights_only=False)
    assert made.exists()


def plan() -> SavePlan:
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(torch.Size([0]), torch.Size([2])),
        properties=TensorProperties(),
        size=torch.Size([2]),
    )
    item = WriteItem(index=MetadataIndex("w"), type=WriteItemType.SHARD, tensor_data=data)
    return SavePlan([item], storage_data=_StoragePrefix("__0_"), planner_data=None)


def test_the_plans_that_megatron_core_keeps_in_the_metadata_are_read(tmp_path: Path):
    write_checkpoint(tmp_path / "checkpoint", {})
    metadata = read_metadata(tmp_path / "checkpoint")
    metadata.all_local_plans = [plan()]
    (tmp_path / "checkpoint" / METADATA_NAME).write_bytes(pickle.dumps(metadata))
    read: Any = read_metadata(tmp_path / "checkpoint")
    assert read.all_local_plans == metadata.all_local_plans


@dataclass
class MCoreMetadata(Metadata):
    """As megatron-core 0.15 has it, with a shape for each reshaped tensor."""

    mcore_data: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class MCoreSavePlan(SavePlan):
    mcore_data: dict[str, dict[str, Any]] | None = None


def test_the_metadata_of_older_megatron_core_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    data = {"w": {"nd_reformulated_orig_global_shape": (2,)}}
    write_checkpoint(tmp_path / "checkpoint", {"content_metadata": {"x": 1}})
    metadata = MCoreMetadata(**vars(read_metadata(tmp_path / "checkpoint")), mcore_data=data)
    metadata.all_local_plans = [MCoreSavePlan(**vars(plan()), mcore_data=data)]
    module = ModuleType("megatron.core.dist_checkpointing.strategies.torch")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)
        for kind in (MCoreMetadata, MCoreSavePlan):
            patch.setattr(module, kind.__name__, kind, raising=False)
            patch.setattr(kind, "__module__", module.__name__)
        (tmp_path / "checkpoint" / METADATA_NAME).write_bytes(pickle.dumps(metadata))
    read: Any = read_metadata(tmp_path / "checkpoint")
    assert type(read) is Metadata
    assert read.mcore_data == read.all_local_plans[0].mcore_data == data
    assert read.all_local_plans == [plan()]
    assert content_metadata(tmp_path / "checkpoint", read) == {"x": 1}


def test_weights_are_loaded_with_one_look_at_the_metadata_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_checkpoint(tmp_path / "checkpoint", {"content_metadata": {"singleton_local_shards": True}})
    looks, loaded, read = [], [], safe_pickle.load_metadata
    monkeypatch.setattr(safe_pickle, "load_metadata", lambda stream: looks.append(stream.name) or read(stream))
    monkeypatch.setattr(checkpoint, "_metadata", dict)
    monkeypatch.setattr(checkpoint.dist_checkpointing, "load", lambda state, path: loaded.append(path) or {})
    checkpoint.load_weights(tmp_path / "checkpoint", [])
    assert looks == [str(tmp_path / "checkpoint" / METADATA_NAME)]
    assert loaded == [str(tmp_path / "checkpoint")]
