"""Checkpoint folders: what is written is what safetensors reads, in bounded files, and broken folders are refused."""

import json
import stat

import pytest
import torch
from safetensors.torch import load_file, save_file

from slimrl.checkpoints.safetensors_folder import INDEX_NAME, SINGLE_NAME, SafetensorsFolder, write_safetensors
from slimrl.data.model_weights import TensorSpec

TENSORS = {
    "a": torch.arange(12.0).reshape(3, 4),
    "b": torch.arange(6.0).to(torch.bfloat16).reshape(2, 3),
    "c": torch.arange(40.0),
}
SPECS = [
    TensorSpec(name=name, shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch."))
    for name, t in TENSORS.items()
]


def test_files_are_bounded_named_and_indexed(tmp_path):
    write_safetensors(tmp_path, SPECS, TENSORS.items(), max_bytes=100)
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    assert index["weight_map"] == {"a": first, "b": first, "c": second}
    assert index["metadata"]["total_size"] == 12 * 4 + 6 * 2 + 40 * 4
    read = load_file(tmp_path / first) | load_file(tmp_path / second)
    assert all(torch.equal(read[name], tensor) for name, tensor in TENSORS.items())
    modes = {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
    assert len(modes) == 1


def test_slices_and_whole_tensors_are_read_with_shape_and_dtype(tmp_path):
    write_safetensors(tmp_path, SPECS, TENSORS.items(), max_bytes=100)
    with SafetensorsFolder(tmp_path) as folder:
        assert list(folder.specs.values()) == SPECS
        assert torch.equal(folder.read("a", (slice(1, 3), slice(0, 2))), TENSORS["a"][1:3, :2])
        assert torch.equal(folder.read("b", (slice(0, 2), slice(0, 3))), TENSORS["b"])


def test_a_single_file_without_index_is_a_folder_too(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    assert set(SafetensorsFolder(tmp_path).specs) == set(TENSORS)


def test_broken_folders_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"neither model\.safetensors\.index\.json nor model\.safetensors"):
        SafetensorsFolder(tmp_path)
    write_safetensors(tmp_path, SPECS, TENSORS.items(), max_bytes=100)
    (tmp_path / "model-00002-of-00002.safetensors").rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"files that are missing: model-00002-of-00002\.safetensors"):
        SafetensorsFolder(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(b"12345678not json")
    with pytest.raises(ValueError, match=r"model-00002-of-00002\.safetensors: not a safetensors file"):
        SafetensorsFolder(tmp_path)
    (tmp_path / "elsewhere").replace(tmp_path / "model-00002-of-00002.safetensors")
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    index["weight_map"]["c"] = "model-00001-of-00002.safetensors"
    index["weight_map"]["d"] = "model-00002-of-00002.safetensors"
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="2 tensors are not in the file that it names, such as c"):
        SafetensorsFolder(tmp_path)


def test_shards_without_an_index_and_indices_of_another_kind_are_refused(tmp_path):
    with pytest.raises(ValueError, match="elsewhere: no such folder"):
        SafetensorsFolder(tmp_path / "elsewhere")
    write_safetensors(tmp_path, SPECS, TENSORS.items(), max_bytes=100)
    index = tmp_path / INDEX_NAME
    good = json.loads(index.read_text())
    single = tmp_path / SINGLE_NAME
    single.write_bytes(b"left behind")
    with pytest.raises(ValueError, match="is there, but the index does not name it"):
        SafetensorsFolder(tmp_path)
    single.unlink()
    index.unlink()
    with pytest.raises(ValueError, match=r"index\.json is missing, which lists the tensors of model-00001"):
        SafetensorsFolder(tmp_path)
    for broken, message in (
        ("{", "not an index of safetensors"),
        ("[]", "not an index of safetensors"),
        (json.dumps({"metadata": {}}), "not an index of safetensors"),
        (json.dumps({"weight_map": {"a": 3}}), "not an index of safetensors"),
        (json.dumps({"weight_map": {"a": "../b.safetensors"}}), "is not the name of a file beside it"),
    ):
        index.write_text(broken)
        with pytest.raises(ValueError, match=message):
            SafetensorsFolder(tmp_path)
    index.write_text(json.dumps(good))
    assert good["weight_map"]["c"] == "model-00002-of-00002.safetensors"
    with SafetensorsFolder(tmp_path) as folder:
        assert folder.specs.keys() == TENSORS.keys()


def test_a_tensor_in_two_files_is_refused(tmp_path):
    write_safetensors(tmp_path, SPECS, TENSORS.items(), max_bytes=100)
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(
        (tmp_path / "model-00001-of-00002.safetensors").read_bytes()
    )
    with pytest.raises(ValueError, match=r"a is in model-00001-of-00002\.safetensors and in model-00002"):
        SafetensorsFolder(tmp_path)


def test_a_float8_tensor_is_named_as_torch_names_it(tmp_path):
    save_file({"x": torch.zeros(4).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    assert SafetensorsFolder(tmp_path).specs["x"].dtype == "float8_e4m3fn"
