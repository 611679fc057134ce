"""Which versions are kept, and what leads from one to another."""

import dataclasses
import os

import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file

from slimrl.checkpoints.versions import local_copy
from slimrl.checkpoints.versions.codec import BlockCodec
from slimrl.checkpoints.versions.directory import VersionDirectory, superfluous
from slimrl.checkpoints.versions.local_copy import LocalCopy, file_hash
from slimrl.checkpoints.versions.manifest import (
    Frame,
    Manifest,
    StoredTensor,
    VersionRef,
    read_manifest,
    write_manifest,
)
from slimrl.config.schema.resync import DeltaEncoding
from slimrl.data.model_weights import TensorSpec
from slimrl.resync.version_writer import LastVersion


def ref(version: int, writing: str = "a") -> VersionRef:
    return VersionRef(version=version, id=f"{writing}{version}")


def manifest(version: int, base: int | None, writing: str = "a") -> Manifest:
    return Manifest(
        ref=ref(version, writing),
        base=None if base is None else ref(base),
        encoding=None if base is None else DeltaEncoding.xor,
        files={"data": 4},
        tensors={},
    )


def publish(directory: VersionDirectory, value: Manifest) -> None:
    partial = directory.begin(value.ref.version)
    (partial / "data").write_bytes(b"data")
    write_manifest(partial, value)
    directory.publish(partial, value.ref.version)


@pytest.fixture
def directory(tmp_path):
    """Versions 1 (whole), 2, 3, 4 (whole), 5, 6, 7."""
    directory = VersionDirectory(tmp_path)
    for version in range(1, 8):
        publish(directory, manifest(version, None if version in (1, 4) else version - 1))
    return directory


def refs(chain: list[Manifest]) -> list[int]:
    return [value.ref.version for value in chain]


def test_a_manifest_is_read_as_it_was_written(tmp_path):
    spec = TensorSpec(name="w", shape=(4, 2), dtype="bfloat16")
    blocks = (
        Frame(file="b", offset=0, nbytes=7, start=0, stop=4),
        Frame(file="a", offset=3, nbytes=9, start=8, stop=16),
    )
    value = dataclasses.replace(
        manifest(3, 2),
        files={"a": 12, "b": 7},
        tensors={"w": StoredTensor(spec=spec, xxh3="0" * 16, frames=blocks)},
    )
    write_manifest(tmp_path, value)
    assert read_manifest(tmp_path) == value


def test_a_manifest_that_is_none_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"no manifest\.json"):
        read_manifest(tmp_path)
    for text in ("", "[]", "{}", '{"format": 2}', '{"format": 1, "files": {"../up": 1}}'):
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(ValueError, match="not a version's manifest"):
            read_manifest(tmp_path)


def test_a_chain_leads_from_what_is_there_or_from_a_whole_version(directory):
    target = read_manifest(directory.folder(7))
    assert refs(directory.chain(target, ref(7))) == []
    assert refs(directory.chain(target, ref(6))) == [7]
    assert refs(directory.chain(target, ref(4))) == [5, 6, 7]
    assert refs(directory.chain(target, None)) == [4, 5, 6, 7]
    assert refs(directory.chain(target, ref(3))) == [4, 5, 6, 7]
    assert refs(directory.chain(target, ref(6, "other"))) == [4, 5, 6, 7]


def test_another_writing_of_a_base_breaks_the_chain(directory):
    target = read_manifest(directory.folder(7))
    publish_again = manifest(5, 4, writing="b")
    write_manifest(directory.folder(5), publish_again)
    with pytest.raises(
        ValueError, match=r"version 6 \(a6\) is a delta on version 5 \(a5\), but .*v000005 is version 5 \(b5\)"
    ):
        directory.chain(target, None)
    assert refs(directory.chain(target, ref(6))) == [7]


def test_a_missing_base_or_a_short_file_breaks_the_chain(directory):
    target = read_manifest(directory.folder(7))
    (directory.folder(6) / "data").write_bytes(b"da")
    with pytest.raises(ValueError, match=r"version 6 .*v000006/data is cut short: 2 bytes of 4"):
        directory.chain(target, None)
    (directory.folder(6) / "data").unlink()
    with pytest.raises(ValueError, match=r"version 6 .*v000006/data is missing"):
        directory.chain(target, None)
    (directory.folder(6) / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"version 7 .* is a delta on version 6 .*, which cannot be read"):
        directory.chain(target, None)


def test_pruning_keeps_what_the_newest_versions_build_on(directory):
    directory.prune(2)
    assert directory.versions() == [4, 5, 6, 7]
    publish(directory, manifest(8, None))
    directory.prune(2)
    assert directory.versions() == [4, 5, 6, 7, 8]
    publish(directory, manifest(9, 8))
    directory.prune(2)
    assert directory.versions() == [8, 9]


@pytest.mark.parametrize("keep", [1, 2, 3, 5])
def test_whatever_is_kept_reaches_a_whole_version(keep):
    bases = {version: None if version % 4 == 0 else version - 1 for version in range(4, 30)}
    left = set(bases) - set(superfluous(bases, keep))
    assert set(sorted(bases)[-keep:]) <= left
    assert all(bases[version] is None or bases[version] in left for version in left)
    assert len(left) <= keep + 3


def test_a_version_that_is_not_whole_has_no_name_and_is_removed_by_the_next(directory):
    partial = directory.begin(8)
    assert directory.versions() == list(range(1, 8))
    assert partial.exists()
    directory.begin(9)
    assert not partial.exists()


def test_a_run_that_goes_back_writes_its_versions_anew(directory):
    publish(directory, manifest(6, None, writing="b"))
    assert directory.versions() == [1, 2, 3, 4, 5, 6]
    assert directory.has(ref(6, "b"))
    assert not directory.has(ref(6))
    assert not directory.has(ref(7))


def test_a_version_that_is_written_again_stays_until_the_new_writing_is_whole(directory):
    partial = directory.begin(7)
    assert directory.versions() == [1, 2, 3, 4, 5, 6, 7]
    assert directory.has(ref(7))
    (partial / "data").write_bytes(b"data")
    write_manifest(partial, manifest(7, None, writing="b"))
    directory.publish(partial, 7)
    assert directory.has(ref(7, "b"))
    assert sorted(path.name for path in directory.root.iterdir()) == [f"v{version:06d}" for version in range(1, 8)]


def test_a_delta_on_a_version_that_is_not_before_it_breaks_the_chain(directory):
    for base in (4, 5):
        value = dataclasses.replace(manifest(4, 3), base=ref(base))
        if base == 4:
            write_manifest(directory.folder(4), value)
        with pytest.raises(
            ValueError, match=rf"version 4 \(a4\) is a delta on version {base} .*, which is not before it"
        ):
            directory.chain(value, None)


def test_a_version_whose_manifest_cannot_be_read_needs_no_other(directory):
    (directory.folder(6) / "manifest.json").write_text("{}")
    directory.prune(2)
    assert directory.versions() == [6, 7]


def test_a_file_that_ends_early_is_named_with_the_byte(tmp_path):
    file = tmp_path / "data"
    file.write_bytes(b"0123456789")
    descriptor = os.open(file, os.O_RDONLY)
    assert file_hash(descriptor, file, 2, 8) == xxhash.xxh3_64_hexdigest(b"23456789")
    assert file_hash(descriptor, file, 4, 0) == xxhash.xxh3_64_hexdigest(b"")
    with pytest.raises(ValueError, match="data: cut short since it was opened: it ends at byte 10"):
        file_hash(descriptor, file, 2, 9)
    os.close(descriptor)


BROKEN_BLOCKS = {
    "backwards": [(4, 4)],
    "beyond the end": [(0, 20)],
    "one over the other": [(0, 8), (4, 12)],
    "out of order": [(8, 12), (0, 4)],
    "too many bytes": [(0, 16)],
}


@pytest.mark.parametrize("kind", BROKEN_BLOCKS)
def test_blocks_that_no_writer_makes_are_refused(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(local_copy, "BLOCK_BYTES", 12)
    spec = TensorSpec(name="w", shape=(8,), dtype="bfloat16")
    (tmp_path / "base").mkdir()
    save_file({"w": torch.zeros(8, dtype=torch.bfloat16)}, tmp_path / "base" / "model.safetensors")
    frames, blocks = b"", []
    for start, stop in BROKEN_BLOCKS[kind]:
        size = max(2, min(stop - start, 12))
        frame = BlockCodec(DeltaEncoding.xor).encode(np.zeros(size, np.uint8), np.ones(size, np.uint8), 2)
        blocks.append(Frame(file="data", offset=len(frames), nbytes=len(frame), start=start, stop=stop))
        frames += frame
    (tmp_path / "data").write_bytes(frames)
    tensors = {"w": StoredTensor(spec=spec, xxh3="0" * 16, frames=tuple(blocks))}
    value = dataclasses.replace(manifest(2, 1), tensors=tensors)
    with pytest.raises(
        ValueError, match=r"version 2 .*model\.safetensors: w: a block of the bytes \d+ to \d+ follows byte"
    ):
        local_copy.apply_delta(tmp_path, value, tmp_path / "base")


def test_a_delta_is_applied_to_tensors_of_its_names_and_shapes_alone(tmp_path):
    frame = BlockCodec(DeltaEncoding.xor).encode(np.zeros(16, np.uint8), np.ones(16, np.uint8), 2)
    (tmp_path / "data").write_bytes(frame)
    block = Frame(file="data", offset=0, nbytes=len(frame), start=0, stop=16)
    spec = TensorSpec(name="w", shape=(8,), dtype="bfloat16")
    tensors = {"w": StoredTensor(spec=spec, xxh3=xxhash.xxh3_64_hexdigest(bytes([1] * 16)), frames=(block,))}
    value = dataclasses.replace(manifest(2, 1), tensors=tensors)
    (tmp_path / "base").mkdir()
    for base in ({"v": torch.zeros(8, dtype=torch.bfloat16)}, {"w": torch.zeros(2, 4, dtype=torch.bfloat16)}):
        save_file(base, tmp_path / "base" / "model.safetensors")
        with pytest.raises(ValueError, match="has no w of this shape and type; it is no base"):
            local_copy.apply_delta(tmp_path, value, tmp_path / "base")
    save_file({"w": torch.zeros(8, dtype=torch.bfloat16)}, tmp_path / "base" / "model.safetensors")
    local_copy.apply_delta(tmp_path, value, tmp_path / "base")
    assert load_file(tmp_path / "base" / "model.safetensors")["w"].view(torch.uint8).tolist() == [1] * 16


def test_a_whole_version_with_a_tensor_that_its_manifest_lacks_is_refused(tmp_path):
    (tmp_path / "v").mkdir()
    save_file({"w": torch.zeros(2), "more": torch.zeros(2)}, tmp_path / "v" / "model.safetensors")
    spec = TensorSpec(name="w", shape=(2,), dtype="float32")
    tensors = {"w": StoredTensor(spec=spec, xxh3=xxhash.xxh3_64_hexdigest(bytes(8)))}
    value = dataclasses.replace(manifest(2, None), files={"model.safetensors": 1}, tensors=tensors)
    with pytest.raises(ValueError, match="more is not in this version"):
        local_copy.copy_whole(tmp_path / "v", value, tmp_path / "copy")


def test_a_place_for_copies_that_is_no_folder_is_named_with_its_setting(tmp_path):
    publish(VersionDirectory(tmp_path / "versions"), manifest(1, None))
    (tmp_path / "local").write_text("a file")
    with (
        pytest.raises(OSError, match=r"resync\.local_dir: ") as raised,
        LocalCopy(tmp_path / "local" / "engine").at(tmp_path / "versions" / "v000001", 5),
    ):
        pass
    assert raised.value.filename == str(tmp_path / "local" / "engine")
    with pytest.raises(OSError, match=r"resync\.local_dir: "):
        LastVersion(tmp_path / "local" / "engine", [])
