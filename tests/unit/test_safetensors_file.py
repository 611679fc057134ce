"""One safetensors file: what is written is what the safetensors library reads, and broken files are refused by name."""

import errno
import json
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from slimrl.checkpoints import safetensors_file
from slimrl.checkpoints.safetensors_file import MAX_HEADER_BYTES, read_header, read_tensor, write_safetensors_file
from slimrl.checkpoints.tensor_bytes import fill
from slimrl.data.model_weights import TensorSpec

DTYPES = ("float8_e4m3fn", "bool", "bfloat16", "float32", "int64", "int8", "float16", "float64", "float8_e8m0fnu")


def tensors_of_all_kinds() -> dict[str, torch.Tensor]:
    """Odd sizes in every dtype, small elements first; a scalar and an empty tensor among them."""
    generator = torch.Generator().manual_seed(0)
    shapes = {dtype: (3, 5) for dtype in DTYPES} | {"float32": (), "int64": (0, 4)}
    return {
        dtype: torch.randint(1, 100, shape, generator=generator).to(getattr(torch, dtype))
        for dtype, shape in shapes.items()
    }


def specs_of(tensors: dict[str, torch.Tensor]) -> list[TensorSpec]:
    return [
        TensorSpec(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
    ]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    bits = [x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)


def test_the_library_reads_what_we_write_in_every_dtype_and_order(tmp_path):
    file, tensors = tmp_path / "a.safetensors", tensors_of_all_kinds()
    write_safetensors_file(file, specs_of(tensors), tensors.items())
    loaded = load_file(file)
    assert set(loaded) == set(tensors)
    assert all(same(loaded[name], tensor) for name, tensor in tensors.items())
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert same(opened.get_slice("float64")[1:, 2:4], tensors["float64"][1:, 2:4])


def test_a_file_takes_the_bytes_that_the_library_s_own_takes(tmp_path):
    tensors = tensors_of_all_kinds()
    write_safetensors_file(tmp_path / "ours", specs_of(tensors), tensors.items())
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    ours, theirs = ((tmp_path / name).read_bytes() for name in ("ours", "theirs"))
    assert len(ours) == len(theirs)
    headers = [json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")]) for raw in (ours, theirs)]
    assert headers[0].keys() == headers[1].keys()


def test_slices_of_what_the_library_writes_are_read_bit_for_bit(tmp_path):
    file, tensors = tmp_path / "a.safetensors", tensors_of_all_kinds()
    save_file(tensors, file)
    descriptor = os.open(file, os.O_RDONLY)
    for name, place in read_header(file).items():
        tensor = tensors[name]
        ways = [tuple(slice(0, size) for size in tensor.shape)]
        if tensor.numel() > 1:
            ways += [(slice(1, 3), slice(0, 5)), (slice(0, 3), slice(1, 4)), (slice(2, 3), slice(4, 5))]
        for slices in ways:
            assert same(read_tensor(descriptor, file, place, slices), tensor[slices]), (name, slices)
    os.close(descriptor)


def test_slices_of_tensors_without_elements_have_the_shape_that_was_asked_for(tmp_path):
    file = tmp_path / "a.safetensors"
    tensors = {"no rows": torch.zeros(0, 4), "no columns": torch.zeros(3, 0, 4), "full": torch.zeros(2, 2)}
    save_file(tensors, file)
    places, descriptor = read_header(file), os.open(file, os.O_RDONLY)
    cases = {
        "no rows": [(slice(0, 0), slice(1, 3)), (slice(0, 0), slice(0, 4))],
        "no columns": [(slice(1, 3), slice(0, 0), slice(1, 2)), (slice(1, 2), slice(0, 0), slice(0, 4))],
        "full": [(slice(1, 1), slice(0, 1))],
    }
    for name, ways in cases.items():
        for slices in ways:
            assert same(read_tensor(descriptor, file, places[name], slices), tensors[name][slices]), (name, slices)
    os.close(descriptor)


def test_a_part_of_the_columns_is_read_in_bands_of_rows(tmp_path, monkeypatch):
    file, tensor = tmp_path / "a.safetensors", torch.arange(77.0).view(11, 7)
    save_file({"x": tensor}, file)
    place, descriptor, read = read_header(file)["x"], os.open(file, os.O_RDONLY), []

    def counting(descriptor, file, out, offset):
        read.append(len(out) // 28)
        fill(descriptor, file, out, offset)

    monkeypatch.setattr(safetensors_file, "fill", counting)
    for band_bytes, heights in ((3 * 28, [3, 3, 2]), (1, [1] * 8), (1000, [8])):
        monkeypatch.setattr(safetensors_file, "BAND_BYTES", band_bytes)
        read.clear()
        assert torch.equal(read_tensor(descriptor, file, place, (slice(2, 10), slice(1, 6))), tensor[2:10, 1:6])
        assert read == heights
    os.close(descriptor)


def test_a_read_tensor_has_memory_of_its_own(tmp_path):
    file = tmp_path / "a.safetensors"
    save_file({"x": torch.zeros(4, 4)}, file)
    place, descriptor = read_header(file)["x"], os.open(file, os.O_RDONLY)
    for slices in ((slice(0, 4), slice(0, 4)), (slice(0, 4), slice(0, 2))):
        read_tensor(descriptor, file, place, slices).fill_(1)
    os.close(descriptor)
    assert not load_file(file)["x"].any()


def test_tensors_are_taken_one_by_one_and_only_as_many_as_the_file_holds(tmp_path):
    specs = [TensorSpec(name=name, shape=(2,), dtype="float32") for name in "abc"]
    source = iter([(name, torch.tensor([1.0, 2.0], dtype=torch.float64)) for name in "abc"])
    write_safetensors_file(tmp_path / "ab", specs[:2], source)
    assert next(source)[0] == "c"
    assert load_file(tmp_path / "ab")["b"].dtype == torch.float32


def broken_files(good: bytes) -> dict[str, tuple[bytes, str]]:
    """Kind -> (the file's bytes, what the refusal says)."""
    length = int.from_bytes(good[:8], "little")
    header, data = json.loads(good[8 : 8 + length]), good[8 + length :]

    def changed(**entries: object) -> bytes:
        raw = json.dumps(header | entries).encode()
        return len(raw).to_bytes(8, "little") + raw + data

    x, y = header["x"], header["y"]
    return {
        "empty": (b"", "not a safetensors file$"),
        "seven bytes": (bytes(7), "not a safetensors file$"),
        "a text": (b"version https://git-lfs.github.com/spec/v1\n", "not a safetensors file$"),
        "not JSON": (b"\x03" + bytes(7) + b"{]}" + data, "not a safetensors file"),
        "a list": (b"\x02" + bytes(7) + b"[]", "not a safetensors file"),
        "cut in the header": (good[:20], "cut short within its header"),
        "cut in the data": (good[:-5], "cut short: 5 of"),
        "longer": (good + b"123", "3 bytes more than its header says"),
        "overlap": (changed(y=y | {"data_offsets": [16, 40]}), "y overlaps x"),
        "gap": (changed(y=y | {"data_offsets": [28, 52]}), "y leaves a gap after x"),
        "wrong size": (changed(x=x | {"shape": [3]}), "x takes 12 bytes, its offsets 0 to 24 are 24"),
        "negative": (changed(x=x | {"shape": [-6]}), r"x has the shape \[-6\]"),
        "dtype": (changed(x=x | {"dtype": "F4"}), "x is F4, which is not supported"),
        "no offsets": (changed(x={"dtype": "F32", "shape": [6]}), "data_offsets"),
    }


def test_broken_files_are_refused_with_name_and_reason(tmp_path):
    file = tmp_path / "model.safetensors"
    specs = [TensorSpec(name=name, shape=(6,), dtype="float32") for name in "xy"]
    write_safetensors_file(file, specs, ((name, torch.ones(6)) for name in "xy"))
    for raw, message in broken_files(file.read_bytes()).values():
        file.write_bytes(raw)
        with pytest.raises(ValueError, match=rf"model\.safetensors: .*{message}"):
            read_header(file)


def test_a_length_that_no_header_has_is_not_read(tmp_path):
    file = tmp_path / "model.safetensors"
    for length, message in ((MAX_HEADER_BYTES + 1, "not a safetensors file$"), (MAX_HEADER_BYTES, "cut short within")):
        file.write_bytes(length.to_bytes(8, "little"))
        with pytest.raises(ValueError, match=message):
            read_header(file)


@pytest.mark.parametrize("slices", [(slice(0, 64), slice(0, 64)), (slice(0, 64), slice(0, 32))])
def test_a_file_that_shrinks_while_it_is_open_is_named(tmp_path, slices):
    file = tmp_path / "a.safetensors"
    save_file({"x": torch.ones(64, 64)}, file)
    place, descriptor = read_header(file)["x"], os.open(file, os.O_RDONLY)
    os.truncate(file, 5000)
    with pytest.raises(ValueError, match=r"a\.safetensors: cut short since it was opened"):
        read_tensor(descriptor, file, place, slices)
    os.close(descriptor)


def test_a_failing_producer_leaves_no_file(tmp_path):
    specs = [TensorSpec(name=name, shape=(2,), dtype="float32") for name in "ab"]

    def produce():
        yield "a", torch.zeros(2)
        raise RuntimeError("gone")

    with pytest.raises(RuntimeError, match="gone"):
        write_safetensors_file(tmp_path / "f", specs, produce())
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_error_that_names_the_file_and_leaves_none(tmp_path, monkeypatch):
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(safetensors_file.os, "pwrite", full)
    spec = TensorSpec(name="a", shape=(2,), dtype="float32")
    with pytest.raises(OSError, match="no space left on the disk") as raised:
        write_safetensors_file(tmp_path / "f", [spec], [("a", torch.zeros(2))])
    assert raised.value.filename == str(tmp_path / "f")
    assert list(tmp_path.iterdir()) == []
