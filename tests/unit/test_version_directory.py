"""Which versions are kept, and what leads from one to another."""

import dataclasses

import pytest

from slimrl.config.schema import DeltaEncoding
from slimrl.data.protocols import TensorSpec
from slimrl.models.versions.directory import VersionDirectory, superfluous
from slimrl.models.versions.manifest import Block, Manifest, StoredTensor, VersionRef, read_manifest, write_manifest


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
        Block(file="b", offset=0, nbytes=7, start=0, stop=4),
        Block(file="a", offset=3, nbytes=9, start=8, stop=16),
    )
    value = dataclasses.replace(
        manifest(3, 2),
        files={"a": 12, "b": 7},
        tensors={"w": StoredTensor(spec=spec, xxh3="0" * 16, blocks=blocks)},
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
