"""Tensors out of torch_dist folders that are written here block by block, whatever the blocks, without Megatron."""

import json
import pickle
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from slimrl_tools.convert.conversion import write_files
from slimrl_tools.convert.output_folder import RECORDS
from slimrl_tools.convert.safetensors_writer import safetensors_writer
from slimrl_tools.convert.torch_dist_writer import distcp_writer
from slimrl_tools.inspect.inspection import inspect_checkpoint
from slimrl_tools.open_checkpoint import FoundCheckpoint, check_model, find_checkpoint
from slimrl_tools.torch_dist import layers_share_keys
from slimrl_tools.verify import verification
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from slimrl.checkpoints.checkpoint_reader import read_blocks, read_whole
from slimrl.checkpoints.safetensors_folder import SafetensorsFolder, write_safetensors
from slimrl.checkpoints.torch_dist.chunks import Chunk, ShardSchema
from slimrl.checkpoints.torch_dist.reader import StoredWeights
from slimrl.checkpoints.torch_dist.safe_pickle import read_metadata
from slimrl.checkpoints.torch_dist.torch_chunk import read_chunk
from slimrl.data.model_weights import TensorSpec
from slimrl.models.architecture import architecture_of
from slimrl.models.hf_config import published_config
from slimrl.models.layout_ops import GateUp, GroupedQKV
from slimrl.models.weight_map import HfTensor, Rule, Shard, WeightMap

ROWS, COLUMNS = 6, 4


def schema() -> ShardSchema:
    """Layer by layer a plain matrix, gate and up apart, and query, key and value in two chunks; a padded embedding."""
    rules = [
        Rule(megatron=("embed",), hf=(HfTensor(name="hf.embed", shape=(5, 3)),), shard=Shard(dim=0, padded_size=8)),
        Rule(megatron=("plain",), hf=(HfTensor(name="hf.plain", shape=(ROWS, COLUMNS)),), shard=Shard(dim=1)),
        Rule(
            megatron=("fc1",),
            hf=tuple(HfTensor(name=f"hf.{name}", shape=(3, COLUMNS)) for name in ("gate", "up")),
            op=GateUp(),
        ),
        Rule(
            megatron=("qkv",),
            hf=tuple(HfTensor(name=f"hf.{name}", shape=(rows, 2)) for name, rows in (("q", 4), ("k", 2), ("v", 2))),
            op=GroupedQKV(2, 1),
        ),
    ]

    def chunk(entry, key, rows, columns, stored, offset):
        return Chunk(
            entry=entry, shard=0, num_shards=1, slices=(slice(*rows), slice(*columns)), key=key, global_shape=stored,
            offset=offset,
        )  # fmt: skip

    chunks = (
        chunk(0, "embed", (0, 8), (0, 3), (8, 3), (0, 0)),
        chunk(1, "layers", (0, ROWS), (0, COLUMNS), (2, ROWS, COLUMNS), (1, 0, 0)),
        chunk(2, "fc1", (0, 3), (0, COLUMNS), (6, COLUMNS), (0, 0)),
        chunk(2, "fc1", (3, 6), (0, COLUMNS), (6, COLUMNS), (3, 0)),
        chunk(3, "qkv", (0, 5), (0, 2), (8, 2), (0, 0)),
        chunk(3, "qkv", (5, 8), (0, 2), (8, 2), (5, 0)),
    )
    return ShardSchema(weight_map=WeightMap(rules), chunks=chunks, objects=())


STORED = {
    "embed": torch.arange(24.0).view(8, 3),
    "layers": torch.arange(100.0, 148.0).view(2, ROWS, COLUMNS).bfloat16(),
    "fc1": torch.arange(200.0, 224.0).view(6, COLUMNS),
    "qkv": torch.arange(300.0, 316.0).view(8, 2),
}
# Two groups of two query heads, a key head and a value head, one row each.
QKV = {"hf.q": [0, 1, 4, 5], "hf.k": [2, 6], "hf.v": [3, 7]}
EXPECTED = {
    "hf.embed": STORED["embed"][:5],
    "hf.plain": STORED["layers"][1],
    "hf.gate": STORED["fc1"][:3],
    "hf.up": STORED["fc1"][3:],
    **{name: STORED["qkv"][rows] for name, rows in QKV.items()},
}

CUTS = {
    "as the chunks are": {"embed": [(8, 3)], "layers": [(1, ROWS, COLUMNS)], "fc1": [(3, COLUMNS)], "qkv": [(5, 2)]},
    "whole": {"embed": [(8, 3)], "layers": [(2, ROWS, COLUMNS)], "fc1": [(6, COLUMNS)], "qkv": [(8, 2)]},
    "small and across": {"embed": [(3, 2)], "layers": [(1, 4, 3)], "fc1": [(4, 3)], "qkv": [(3, 1)]},
}
"""By stored tensor the largest block."""


def write_folder(folder: Path, cut, *, lacks=None, tensors=STORED) -> Metadata:
    """Two files of blocks, and what says where they lie; `lacks` (key, offset) is not stored."""
    folder.mkdir(exist_ok=True)
    stored, places = {"optimizer.step": BytesStorageMetadata()}, {}
    streams = [(folder / f"__{number}_0.distcp").open("wb") for number in range(2)]
    for key, tensor in tensors.items():
        (steps,) = cut[key]
        stored[key] = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.shape, [])
        grid = [range(0, size, step) for size, step in zip(tensor.shape, steps, strict=True)]
        for number, offset in enumerate(torch.cartesian_prod(*map(torch.tensor, map(list, grid))).tolist()):
            if (key, tuple(offset)) == lacks:
                continue
            block = tensor[tuple(slice(at, at + step) for at, step in zip(offset, steps, strict=True))].clone()
            stream = streams[number % 2]
            start = stream.tell()
            torch.save(block, stream)
            stored[key].chunks.append(ChunkStorageMetadata(torch.Size(offset), block.shape))
            places[MetadataIndex(key, offset)] = _StorageInfo(Path(stream.name).name, start, stream.tell() - start)
    for stream in streams:
        stream.close()
    metadata = Metadata(state_dict_metadata=stored, storage_data=places)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return metadata


@pytest.mark.parametrize("cut", CUTS)
def test_tensors_are_put_together_from_blocks_of_any_cut(tmp_path, cut):
    write_folder(tmp_path, CUTS[cut])
    with StoredWeights(tmp_path, read_metadata(tmp_path), schema()) as reader:
        assert {name: (spec.shape, spec.dtype) for name, spec in reader.specs.items()} == {
            name: (tuple(value.shape), str(value.dtype).removeprefix("torch.")) for name, value in EXPECTED.items()
        }
        for name, value in EXPECTED.items():
            found = reader.read(name, tuple(slice(0, size) for size in value.shape))
            assert found.dtype == value.dtype
            assert torch.equal(found, value), name
            assert torch.equal(reader.read(name, (slice(1, 2), slice(0, 1))), value[1:2, :1])


def test_neighbours_of_one_megatron_tensor_are_read_once(tmp_path, monkeypatch):
    read = []

    def counting(path, place):
        read.append(place.offset)
        return read_chunk(path, place)

    monkeypatch.setattr("slimrl.checkpoints.torch_dist.reader.read_chunk", counting)
    with StoredWeights(tmp_path, write_folder(tmp_path, CUTS["whole"]), schema()) as reader:
        for name in ("hf.q", "hf.k", "hf.v", "hf.q"):
            read_whole(reader, name)
        assert len(read) == 2
        # Stored as it is and read alone, so that the other stays.
        read_whole(reader, "hf.embed")
        read_whole(reader, "hf.q")
        assert len(read) == 2
        read_whole(reader, "hf.plain")
        read_whole(reader, "hf.q")
        assert len(read) == 5


@pytest.mark.parametrize("cut", CUTS)
def test_blocks_of_rows_make_up_every_tensor(tmp_path, monkeypatch, cut):
    monkeypatch.setattr("slimrl.checkpoints.checkpoint_reader.BLOCK_BYTES", 2 * COLUMNS)
    with StoredWeights(tmp_path, write_folder(tmp_path, CUTS[cut]), schema()) as reader:
        for name, value in EXPECTED.items():
            blocks = list(read_blocks(reader, name, tuple(slice(0, size) for size in value.shape)))
            assert len(blocks) > 1
            assert torch.equal(torch.cat(blocks), value)


def test_what_is_not_stored_whole_is_an_error_that_counts(tmp_path):
    metadata = write_folder(tmp_path, CUTS["small and across"], lacks=("layers", (1, 4, 3)))
    reader = StoredWeights(tmp_path, metadata, schema())
    with pytest.raises(ValueError, match="22 of 24 elements of layers are stored"):
        read_whole(reader, "hf.plain")
    assert torch.equal(read_whole(reader, "hf.up"), EXPECTED["hf.up"])


def test_a_block_of_another_shape_than_its_metadata_says_is_refused(tmp_path):
    metadata = write_folder(tmp_path, CUTS["whole"])
    fc1 = metadata.state_dict_metadata["fc1"]
    fc1.chunks[0] = ChunkStorageMetadata(fc1.chunks[0].offsets, torch.Size((COLUMNS, 6)))
    fc1.size = torch.Size((6, COLUMNS))
    with pytest.raises(ValueError, match=r"fc1 is \[6, 4\], its metadata says \[4, 6\]"):
        read_whole(StoredWeights(tmp_path, metadata, schema()), "hf.gate")


@pytest.mark.parametrize(
    ("key", "tensor", "says"),
    [
        ("embed", None, "embed: missing"),
        ("embed", torch.zeros(7, 3), r"embed: shape \[7, 3\], the model has \[8, 3\]"),
        ("embed", torch.zeros(8, 4), r"embed: shape \[8, 4\], the model has \[8, 3\]"),
        ("embed", torch.zeros(9, 3), None),
        ("fc1", torch.zeros(7, COLUMNS), r"fc1: shape \[7, 4\], the model has \[6, 4\]"),
        ("fc1", torch.zeros(5, COLUMNS), r"fc1: shape \[5, 4\], the model has \[6, 4\]"),
    ],
)
def test_weights_of_another_model_are_refused_by_name_and_only_the_vocabulary_may_be_padded(
    tmp_path, key, tensor, says
):
    tensors = {name: value for name, value in {**STORED, key: tensor}.items() if value is not None}
    metadata = write_folder(tmp_path, CUTS["whole"] | {key: [(100, 100)]}, tensors=tensors)
    if says is None:
        StoredWeights(tmp_path, metadata, schema()).close()
        return
    with pytest.raises(ValueError, match=rf"these are not the weights of the model in its config\.json:\n  {says}"):
        StoredWeights(tmp_path, metadata, schema())


def test_many_missing_weights_are_counted(tmp_path):
    metadata = write_folder(tmp_path, CUTS["whole"], tensors={"embed": STORED["embed"]})
    chunks = tuple(replace(schema().chunks[1], key=f"other{number}") for number in range(13))
    with pytest.raises(ValueError, match=r"other9: missing\n  and 3 more$"):
        StoredWeights(tmp_path, metadata, replace(schema(), chunks=chunks))
    with pytest.raises(ValueError, match=r"other9: missing$"):
        StoredWeights(tmp_path, metadata, replace(schema(), chunks=chunks[:10]))


def test_files_that_are_missing_or_cut_short_are_named(tmp_path):
    metadata = write_folder(tmp_path, CUTS["small and across"])
    file = tmp_path / "__1_0.distcp"
    raw = file.read_bytes()
    file.write_bytes(raw[:-1])
    with pytest.raises(ValueError, match=rf"__1_0\.distcp: cut short, {len(raw) - 1} of {len(raw)} bytes are there"):
        StoredWeights(tmp_path, metadata, schema())
    file.unlink()
    with pytest.raises(ValueError, match=r"__1_0\.distcp: missing, though \.metadata names it"):
        StoredWeights(tmp_path, metadata, schema())


def test_metadata_that_is_missing_or_broken_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"not a torch_dist checkpoint, it has no \.metadata"):
        read_metadata(tmp_path)
    for raw in (b"", b"no pickle", b"cno_such_module\nThing\n."):
        (tmp_path / ".metadata").write_bytes(raw)
        with pytest.raises(ValueError, match=r"\.metadata: cannot be read"):
            read_metadata(tmp_path)


def test_a_folder_of_a_run_is_described_by_its_weights_and_what_else_is_in_it(tmp_path):
    folder = tmp_path / "trainer"
    tensors = STORED | {"optimizer.state.exp_avg": torch.zeros(10, 2)}
    write_folder(folder, CUTS["small and across"] | {"optimizer.state.exp_avg": [(4, 2)]}, tensors=tensors)
    facts = inspect_checkpoint(tmp_path)
    assert (facts["format"], facts["path"], facts["family"]) == ("torch_dist", str(folder), None)
    assert "holds no config.json of its model; give one with --hf" in facts["reason"]
    assert facts["storage"] == {
        "files": 2,
        "bytes_on_disk": sum(file.stat().st_size for file in folder.glob("*.distcp")),
        "dtypes": {"bfloat16": {"tensors": 1, "bytes": 96}, "float32": {"tensors": 3, "bytes": 4 * (24 + 24 + 16)}},
    }
    # 3 x 2 of the embedding, 2 x 2 x 2 of the layers, 2 x 2 and 3 x 2 of the others.
    assert facts["torch_dist"] == {"saved_under": None, "weight_chunks": 6 + 8 + 4 + 6, "optimizer_bytes": 80}
    (folder / "checkpoint.json").write_text(json.dumps({"architecture": {}, "layout": {"tensor": 2}}))
    assert inspect_checkpoint(tmp_path)["torch_dist"]["saved_under"] == {"tensor": 2}


def test_a_torch_dist_folder_has_its_own_config_or_the_one_that_is_given(tmp_path):
    (tmp_path / ".metadata").write_bytes(b"")
    bare = FoundCheckpoint(format="torch_dist", path=tmp_path, hf_dir=None)
    assert find_checkpoint(tmp_path) == bare
    with pytest.raises(ValueError, match=r"no hf/config\.json beside the weights; give one with --hf"):
        bare.hf_config()
    (tmp_path / "hf").mkdir()
    assert find_checkpoint(tmp_path) == bare
    config = published_config("Qwen3-30B-A3B")
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    found = find_checkpoint(tmp_path)
    assert (found.hf_dir, found.hf_config()) == (tmp_path / "hf", config)
    assert find_checkpoint(tmp_path, tmp_path / "given").hf_dir == tmp_path / "given"
    check_model(found)
    facts = architecture_of(config)
    (tmp_path / "checkpoint.json").write_text(json.dumps({"architecture": facts}))
    check_model(found)
    (tmp_path / "checkpoint.json").write_text(json.dumps({"architecture": facts | {"num_layers": 3}}))
    with pytest.raises(ValueError, match="a checkpoint of another model: num_layers is 3 there and 48 here"):
        check_model(found)


def test_the_newest_iteration_of_megatron_lm_s_folder_is_taken_by_its_name(tmp_path):
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    for content, name in (("10\n", "iter_0000010"), ("12345678", "iter_12345678"), ("release", "release")):
        tracker.write_text(content)
        with pytest.raises(ValueError, match=rf"latest_checkpointed_iteration\.txt names {name}, which is not there"):
            find_checkpoint(tmp_path)
        (tmp_path / name).mkdir()
        with pytest.raises(ValueError, match=rf"names {name}, which holds no \.metadata; only torch_dist is read"):
            find_checkpoint(tmp_path)
        (tmp_path / name / ".metadata").write_bytes(b"")
        assert find_checkpoint(tmp_path) == FoundCheckpoint(format="torch_dist", path=tmp_path / name, hf_dir=None)
    for content in ("", "ten", "../iter_0000010", "-1"):
        tracker.write_text(content)
        with pytest.raises(ValueError, match=r"holds '.*', neither an iteration nor `release`"):
            find_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("keys", "shared"),
    [
        (["decoder.layers.mlp.router.weight", "embedding.word_embeddings.weight"], True),
        (["decoder.layers.0.mlp.router.weight", "decoder.layers.11.mlp.router.weight"], False),
        (["mtp.layers.0.enorm.weight", "optimizer.state.exp_avg.decoder.layers.mlp.router.weight"], False),
    ],
)
def test_keys_tell_whether_layers_share_them(keys, shared):
    assert layers_share_keys(Metadata(state_dict_metadata=dict.fromkeys(keys))) == shared


def test_a_checkpoint_without_config_is_taken_for_one_of_the_other_s_model(tmp_path):
    bare = FoundCheckpoint(format="torch_dist", path=tmp_path / "bare", hf_dir=None)
    full = FoundCheckpoint(format="huggingface", path=tmp_path / "full", hf_dir=tmp_path / "full")
    other = FoundCheckpoint(format="huggingface", path=tmp_path / "other", hf_dir=tmp_path / "other")
    given = replace(bare, hf_dir=full.hf_dir)
    assert verification._with_configs(bare, full) == (given, full)
    assert verification._with_configs(full, bare) == (full, given)
    assert verification._with_configs(full, other) == (full, other)


def test_a_part_of_a_conversion_writes_what_is_due_and_reads_all_of_it_back(tmp_path):
    """To safetensors: with copies, and with tensors that another folder gives."""
    stored = tmp_path / "stored"
    metadata = write_folder(stored, CUTS["small and across"])
    carried = {"hf.mtp": torch.full((2, 2), 7.0)}
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps({"dtype": "float32"}))
    write_safetensors(
        tmp_path / "hf", [TensorSpec(name="hf.mtp", shape=(2, 2), dtype="float32")], iter(carried.items())
    )
    written = {**EXPECTED, **carried, "copy": EXPECTED["hf.embed"], "copy of mtp": carried["hf.mtp"]}
    specs = [TensorSpec(name=name, shape=tuple(value.shape), dtype="bfloat16") for name, value in written.items()]
    files = {"a.safetensors": specs[:4], "b.safetensors": specs[4:]}
    out = tmp_path / "out"
    (out / RECORDS).mkdir(parents=True)

    def write(check):
        done = []
        opened = partial(
            safetensors_writer, (stored, metadata, schema()), tmp_path / "hf", frozenset(carried),
            {"copy": "hf.embed", "copy of mtp": "hf.mtp"},
        )  # fmt: skip
        write_files(opened, out, check, files, done.append)
        return sum(done)

    nbytes = 2 * sum(value.numel() for value in written.values())
    assert write(True) == 2 * nbytes
    for name, group in files.items():
        single = tmp_path / name.removesuffix(".safetensors")
        single.mkdir()
        shutil.copyfile(out / name, single / "model.safetensors")
        with SafetensorsFolder(single) as folder:
            assert list(folder.specs) == [spec.name for spec in group]
            for spec in group:
                assert torch.equal(read_whole(folder, spec.name), written[spec.name].bfloat16()), spec.name
    # Nothing is due: with the check all is read, without it nothing.
    assert (write(True), write(False)) == (nbytes, 0)
    (out / RECORDS / "a.safetensors.json").unlink()
    first = 2 * sum(written[spec.name].numel() for spec in files["a.safetensors"])
    assert write(False) == first
    raw = bytearray((out / "b.safetensors").read_bytes())
    raw[-1] ^= 1
    (out / "b.safetensors").write_bytes(raw)
    assert write(False) == 0
    with pytest.raises(OSError, match=r"b\.safetensors: copy of mtp reads back differently"):
        write(True)


def test_a_part_of_a_conversion_to_torch_dist_does_so_too(tmp_path):
    src, out = tmp_path / "src", tmp_path / "out"
    src.mkdir()
    (src / "config.json").write_text("{}")
    specs = [TensorSpec(name=name, shape=tuple(value.shape), dtype="float32") for name, value in EXPECTED.items()]
    write_safetensors(src, specs, iter(EXPECTED.items()))
    (out / RECORDS).mkdir(parents=True)
    whole, dtypes = schema(), [torch.float32] * 4
    files = {"__0_0.distcp": list(whole.chunks[:2]), "__0_1.distcp": list(whole.chunks[2:])}

    def write(check):
        done = []
        opened = partial(distcp_writer, src, whole.weight_map.entries, dtypes)
        write_files(opened, out, check, files, done.append)
        return sum(done)

    nbytes = write(False)
    assert nbytes == sum((out / name).stat().st_size for name in files)
    assert (write(True), write(False)) == (nbytes, 0)
    (out / RECORDS / "__0_1.distcp.json").unlink()
    assert write(True) == nbytes + (out / "__0_1.distcp").stat().st_size
    raw = bytearray((out / "__0_0.distcp").read_bytes())
    raw[len(raw) // 2] ^= 1
    (out / "__0_0.distcp").write_bytes(raw)
    with pytest.raises(OSError, match="reads back differently"):
        write(True)
