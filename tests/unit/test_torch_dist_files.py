"""Files of torch_dist checkpoints: how they are cut, written, checked and recorded, without Megatron."""

import os
import resource
from pathlib import Path

import pytest
import torch
import xxhash
from slimrl_tools.convert.conversion import Plan
from slimrl_tools.convert.workers import divide, run_workers

from slimrl.checkpoints.digests import check_spans
from slimrl.checkpoints.torch_dist.chunks import Chunk, ShardSchema
from slimrl.checkpoints.torch_dist.files import plan_distcp_files, write_distcp_file
from slimrl.data.model_weights import TensorSpec
from slimrl.models.weight_map import HfTensor, Rule, Shard, WeightMap

SIZE = 1000


class Reader:
    """One tensor of consecutive numbers per name."""

    def __init__(self) -> None:
        self.specs = {name: TensorSpec(name=name, shape=(SIZE, 2), dtype="float32") for name in ("a", "b")}
        self.path = Path("nowhere")

    def read(self, name, slices):
        start = 0 if name == "a" else 10_000
        return torch.arange(start, start + 2 * SIZE, dtype=torch.float32).view(SIZE, 2)[slices]


def schema() -> ShardSchema:
    """Two tensors, each sharded by rows into two, each shard stored as two chunks."""
    rules = [
        Rule(megatron=(name.upper(),), hf=(HfTensor(name=name, shape=(SIZE, 2)),), shard=Shard(dim=0))
        for name in ("a", "b")
    ]
    chunks = [
        Chunk(
            entry=entry,
            shard=shard,
            num_shards=2,
            slices=(slice(half * 250, half * 250 + 250), slice(0, 2)),
            key="AB"[entry],
            global_shape=(1, SIZE, 2),
            offset=(0, shard * 500 + half * 250, 0),
        )
        for entry in (0, 1)
        for shard in (0, 1)
        for half in (0, 1)
    ]
    return ShardSchema(weight_map=WeightMap(rules), chunks=tuple(chunks), objects=())


def test_files_are_cut_at_the_size_asked_for_and_never_within_a_shard():
    dtypes = [torch.float32, torch.bfloat16]
    assert [len(chunks) for chunks in plan_distcp_files(schema(), dtypes).values()] == [8]
    # A shard of the first tensor has 4000 bytes, one of the second 2000.
    files = plan_distcp_files(schema(), dtypes, 6000)
    assert [[(chunk.entry, chunk.shard) for chunk in chunks] for chunks in files.values()] == [
        [(0, 0), (0, 0)],
        [(0, 1), (0, 1), (1, 0), (1, 0)],
        [(1, 1), (1, 1)],
    ]
    assert len(plan_distcp_files(schema(), dtypes, 1)) == 4


def write(path: Path):
    """Spans of the written file, and the bytes that could be read there at the time."""
    whole = schema()
    told = []
    write_distcp_file(
        path,
        whole.chunks,
        whole.weight_map.entries,
        [torch.float32, torch.bfloat16],
        Reader(),
        lambda descriptor, span: told.append((span, os.pread(descriptor, span.length, span.start))),
    )
    return [span for span, _ in told], told


def test_a_file_holds_every_chunk_as_torch_saves_it_and_its_span_says_where(tmp_path):
    spans, told = write(tmp_path / "__0_0.distcp")
    assert [file.name for file in tmp_path.iterdir()] == ["__0_0.distcp"]
    raw = (tmp_path / "__0_0.distcp").read_bytes()
    assert told == [(span, raw[span.start : span.start + span.length]) for span in spans]
    for span, chunk in zip(spans, schema().chunks, strict=True):
        (tmp_path / "one").write_bytes(raw[span.start : span.start + span.length])
        tensor = torch.load(tmp_path / "one", weights_only=True)
        rows = slice(chunk.offset[1], chunk.offset[1] + 250)
        expected = Reader().read("ab"[chunk.entry], (rows, slice(0, 2)))
        assert tensor.shape == (1, 250, 2)
        assert torch.equal(tensor[0], expected.to(tensor.dtype))
        assert span.name == chunk.key
        assert span.digest == xxhash.xxh3_128_hexdigest((tmp_path / "one").read_bytes())
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    assert torch.serialization.get_crc32_options()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_chunk_is_written_in_blocks_and_gives_the_same_file(tmp_path, monkeypatch, dtype):
    (entry, _), asked = schema().weight_map.entries, []
    chunk = Chunk(
        entry=0, shard=1, num_shards=2, slices=(slice(0, 500), slice(0, 2)), key="A", global_shape=(SIZE, 2),
        offset=(500, 0),
    )  # fmt: skip

    class Counting(Reader):
        def read(self, name, slices):
            asked.append(slices[0])
            return super().read(name, slices)

    def written(name: str) -> tuple[bytes, list]:
        spans = []
        arguments = [chunk], [entry], [dtype], Counting(), lambda _, span: spans.append(span)
        write_distcp_file(tmp_path / name, *arguments)
        return (tmp_path / name).read_bytes(), spans

    whole, whole_spans = written("whole")
    assert asked == [slice(500, 1000)]
    assert torch.equal(torch.load(tmp_path / "whole"), Reader().read("a", (slice(500, 1000),)).to(dtype))
    asked.clear()
    monkeypatch.setattr("slimrl.checkpoints.checkpoint_reader.BLOCK_BYTES", 8 * 150)
    blocks, spans = written("blocks")
    assert asked == [slice(start, min(start + 150, 1000)) for start in range(500, 1000, 150)]
    assert blocks == whole
    assert spans == whole_spans


def test_a_source_that_breaks_between_two_blocks_leaves_nothing(tmp_path, monkeypatch):
    class Broken(Reader):
        def read(self, name, slices):
            if slices[0].start:
                raise ValueError("cut short")
            return super().read(name, slices)

    entries = schema().weight_map.entries[:1]
    chunk = Chunk(
        entry=0, shard=0, num_shards=1, slices=(slice(0, SIZE), slice(0, 2)), key="A", global_shape=(SIZE, 2),
        offset=(0, 0),
    )  # fmt: skip
    monkeypatch.setattr("slimrl.checkpoints.checkpoint_reader.BLOCK_BYTES", 8 * 150)
    with pytest.raises(ValueError, match=r"^cut short$"):
        write_distcp_file(tmp_path / "a", [chunk], entries, [torch.float32], Broken(), lambda *_: None)
    assert not list(tmp_path.iterdir())


def check(file: Path, spans) -> None:
    with file.open("rb") as stream:
        check_spans(stream.fileno(), file, spans, lambda _: None)


@pytest.mark.parametrize("damage", ["element", "framing", "end"])
def test_a_file_that_changed_on_the_disk_does_not_pass_the_check(tmp_path, damage):
    file = tmp_path / "__0_0.distcp"
    spans, _ = write(file)
    check(file, spans)
    raw = bytearray(file.read_bytes())
    if damage == "element":
        position = raw.index(torch.tensor(7.0).numpy().tobytes())
        raw[position] ^= 1
    elif damage == "framing":
        raw[spans[1].start : spans[1].start + 64] = bytes(64)
    else:
        del raw[-3000:]
    file.write_bytes(raw)
    with pytest.raises(OSError, match="reads back differently"):
        check(file, spans)


def test_a_write_that_fails_is_the_systems_error_and_names_the_file_and_leaves_nothing(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with pytest.raises(OSError, match=r"could not be written: File too large: '.*/__0_0\.distcp'"):
            write(tmp_path / "__0_0.distcp")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


def test_parts_are_of_about_equal_size_and_none_is_empty():
    sizes = {f"f{i}": size for i, size in enumerate([5, 1, 1, 1, 1, 1])}
    assert divide(sizes, 2) == [["f0"], ["f1", "f2", "f3", "f4", "f5"]]
    assert divide(sizes, 100) == [[name] for name in sizes]
    assert divide({}, 4) == [[]]


def test_a_single_part_is_worked_on_in_this_process():
    done = []
    run_workers(lambda part, advance: [advance(size) for size in part], [[1, 2]], done.append)
    assert done == [1, 2]


def test_a_plan_says_what_is_written_and_what_memory_it_takes(tmp_path):
    plan = Plan(out=tmp_path / "out", num_tensors=3, files={"a": 10**9, "b": 10**9}, largest_bytes=10**8)
    told = plan.describe(2)
    assert "3 tensors, 2.00 GB in 2 files" in told
    assert "100.00 MB" in told
    assert "600.00 MB" in told
    assert "2 processes hold at most 3 of this size each" in told
    alone = Plan(out=tmp_path / "out", num_tensors=1, files={"a": 10**9}, largest_bytes=10**8)
    assert "1 tensor, 1.00 GB in 1 file\n" in alone.describe(1)
    assert "1 process holds at most 3 of this size, 300.00 MB" in alone.describe(1)
