"""Chunks of torch_dist files: rows of contiguous ones are read without the rest, all others whole."""

import io
import random
import zipfile
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slimrl.checkpoints.torch_dist.torch_chunk import read_chunk, read_rows

PLAIN = {
    "bfloat16": torch.arange(6).to(torch.bfloat16).view(2, 3),
    "float32": torch.arange(24.0).view(1, 2, 3, 4),
    "float16": torch.arange(5).to(torch.float16),
    "float64": torch.tensor(3.0, dtype=torch.float64),
    "empty": torch.empty(0, 3),
    "length 1": torch.arange(3.0).view(1, 3, 1),
}
OTHER = {
    "a view of more": torch.arange(10.0)[2:5],
    "transposed": torch.arange(6.0).view(2, 3).T,
    "float8": torch.ones(4).to(torch.float8_e4m3fn),
    "integers": torch.arange(4),
    "a parameter": torch.nn.Parameter(torch.arange(3.0)),
    "with a gradient": torch.arange(3.0).requires_grad_(),
    "conjugate": torch.ones(2, dtype=torch.complex64).conj(),
}


def saved(tensor: object, **how: object) -> bytes:
    raw = io.BytesIO()
    torch.save(tensor, raw, **how)
    return raw.getvalue()


def stored(folder, raw: bytes, before: bytes = b"x" * 1000) -> SimpleNamespace:
    """A file in which the block lies between others."""
    (folder / "__0_0.distcp").write_bytes(before + raw + saved(torch.zeros(100)))
    return SimpleNamespace(relative_path="__0_0.distcp", offset=len(before), length=len(raw))


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("crc32", [True, False])
def test_a_chunk_and_its_rows_are_what_was_saved(tmp_path, kind, crc32):
    torch.serialization.set_crc32_options(crc32)
    place = stored(tmp_path, saved(PLAIN[kind]))
    torch.serialization.set_crc32_options(True)
    tensor = read_chunk(tmp_path, place)
    assert tensor.dtype == PLAIN[kind].dtype
    assert torch.equal(tensor, PLAIN[kind])
    assert tensor.untyped_storage().nbytes() == tensor.nbytes
    shape = tuple(PLAIN[kind].shape)
    for rows in (slice(0, size) for size in shape[:1]):
        assert torch.equal(read_rows(tmp_path, place, shape, rows), PLAIN[kind])
    for rows in (slice(start, start + 1) for size in shape[:1] for start in range(size)):
        read = read_rows(tmp_path, place, shape, rows)
        assert read.dtype == PLAIN[kind].dtype
        assert torch.equal(read, PLAIN[kind][rows])
    assert read_rows(tmp_path, place, (*shape, 1), slice(0, 1)) is None


def test_rows_are_read_without_the_rest(tmp_path):
    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    place, before = stored(tmp_path, saved(torch.zeros(1000, 1000))), bytes_read()
    assert read_rows(tmp_path, place, (1000, 1000), slice(3, 5)).shape == (2, 1000)
    assert bytes_read() - before < 200_000
    assert read_chunk(tmp_path, place).shape == (1000, 1000)
    assert bytes_read() - before > 4_000_000


@pytest.mark.parametrize("kind", OTHER)
def test_any_other_tensor_is_read_as_it_was_saved(tmp_path, kind):
    place, tensor = stored(tmp_path, saved(OTHER[kind])), OTHER[kind].detach()
    read = read_chunk(tmp_path, place)
    assert read.dtype == tensor.dtype
    assert read.tolist() == tensor.tolist()
    rows = read_rows(tmp_path, place, tuple(tensor.shape), slice(1, 2))
    assert rows is None if kind == "transposed" else rows.tolist() == tensor[1:2].tolist()


def test_rows_of_the_other_byte_order_are_left_to_torch(tmp_path):
    place = stored(tmp_path, saved(torch.arange(4.0)).replace(b"little", b"bigger"))
    assert read_rows(tmp_path, place, (4,), slice(0, 1)) is None


def test_a_chunk_of_an_older_torch_which_does_not_say_its_byte_order_is_read(tmp_path):
    raw, tensor = io.BytesIO(), PLAIN["bfloat16"]
    with zipfile.ZipFile(io.BytesIO(saved(tensor))) as new, zipfile.ZipFile(raw, "w") as old:
        for entry in new.infolist():
            if not entry.filename.endswith(("/byteorder", "/.format_version", "/.storage_alignment")):
                old.writestr(entry, new.read(entry))
    place = stored(tmp_path, raw.getvalue())
    assert torch.equal(read_chunk(tmp_path, place), tensor)
    assert torch.equal(read_rows(tmp_path, place, (2, 3), slice(1, 2)), tensor[1:])


def test_a_chunk_in_the_format_before_zip_files_is_read_whole(tmp_path):
    tensor = torch.arange(6.0).view(3, 2)
    place = stored(tmp_path, saved(tensor, _use_new_zipfile_serialization=False))
    assert read_rows(tmp_path, place, (3, 2), slice(1, 2)) is None
    assert torch.equal(read_chunk(tmp_path, place), tensor)


def test_a_tensor_that_was_saved_without_elements_is_refused(tmp_path):
    place = stored(tmp_path, saved(torch.ones(3, device="meta")))
    assert read_rows(tmp_path, place, (3,), slice(0, 1)) is None
    with pytest.raises(ValueError, match=r"__0_0\.distcp: at byte 1000 is a tensor of device meta, without elements"):
        read_chunk(tmp_path, place)


@pytest.mark.parametrize("length", [16, 1024])
def test_rows_of_a_record_of_another_length_are_left_to_torch_which_refuses_it(tmp_path, length):
    raw, tensor = io.BytesIO(), torch.arange(64.0)
    with zipfile.ZipFile(io.BytesIO(saved(tensor))) as new, zipfile.ZipFile(raw, "w") as other:
        for entry in new.infolist():
            data = new.read(entry)
            other.writestr(entry, (data * 4)[:length] if entry.filename.endswith("/data/0") else data)
    place = stored(tmp_path, raw.getvalue())
    assert read_rows(tmp_path, place, (64,), slice(2, 5)) is None
    with pytest.raises(ValueError, match=r"__0_0\.distcp: corrupt at byte 1000: record size"):
        read_chunk(tmp_path, place)


def test_a_chunk_that_is_no_tensor_is_refused(tmp_path):
    others = [saved(value) for value in ({"a": torch.ones(3)}, [1, None])]
    for raw in (b"", b"PK" + bytes(500), saved(torch.ones(500))[:-200], *others):
        with pytest.raises(ValueError, match=r"__0_0\.distcp: corrupt at byte 1000"):
            read_chunk(tmp_path, stored(tmp_path, raw))
        assert read_rows(tmp_path, stored(tmp_path, raw), (500,), slice(0, 1)) is None


def test_damaged_framing_gives_a_tensor_no_larger_than_the_block_or_a_refusal(tmp_path):
    tensor, choice = torch.arange(64.0), random.Random(3)
    raw = saved(tensor)
    data = raw.index(tensor.numpy().tobytes())
    for _ in range(300):
        damaged = bytearray(raw)
        position = choice.choice([*range(data), *range(data + tensor.nbytes, len(raw))])
        damaged[position] ^= 1 << choice.randrange(8)
        place = stored(tmp_path, bytes(damaged))
        with suppress(ValueError):
            read = read_chunk(tmp_path, place)
            assert isinstance(read, torch.Tensor)
            assert read.nbytes <= len(raw)
        rows = read_rows(tmp_path, place, (64,), slice(60, 64))
        assert rows is None or rows.shape == (4,)


def test_nothing_but_tensors_comes_out_of_a_pickle(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "made"), "w"))

    place = stored(tmp_path, saved(Evil()))
    assert read_rows(tmp_path, place, (1,), slice(0, 1)) is None
    with pytest.raises(ValueError, match="corrupt"):
        read_chunk(tmp_path, place)
    assert not (tmp_path / "made").exists()
