"""Chunks of torch_dist files: plain ones are read without torch.load and are what it loads, all others by it."""

import io
import random
import zipfile
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch

from slimrl.checkpoints.torch_dist import torch_chunk
from slimrl.checkpoints.torch_dist.torch_chunk import plain_layout, read_chunk

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
def test_a_contiguous_tensor_is_read_without_torch_load(tmp_path, monkeypatch, kind, crc32):
    torch.serialization.set_crc32_options(crc32)
    place = stored(tmp_path, saved(PLAIN[kind]))
    torch.serialization.set_crc32_options(True)
    monkeypatch.setattr(torch_chunk.torch, "load", None)
    tensor = read_chunk(tmp_path, place)
    assert tensor.dtype == PLAIN[kind].dtype
    assert tensor.shape == PLAIN[kind].shape
    assert torch.equal(tensor, PLAIN[kind])
    assert tensor.untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize("kind", OTHER)
def test_any_other_tensor_is_loaded_by_torch(tmp_path, kind):
    raw = saved(OTHER[kind])
    assert plain_layout(io.BytesIO(raw)) is None
    tensor = read_chunk(tmp_path, stored(tmp_path, raw))
    assert tensor.dtype == OTHER[kind].dtype
    assert tensor.tolist() == OTHER[kind].tolist()


def test_a_block_of_the_other_byte_order_is_loaded_by_torch(tmp_path):
    raw = saved(torch.arange(4.0)).replace(b"little", b"bigger")
    assert plain_layout(io.BytesIO(raw)) is None


def test_a_block_of_an_older_torch_which_does_not_say_its_byte_order_is_read(tmp_path):
    raw = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved(PLAIN["float32"]))) as new, zipfile.ZipFile(raw, "w") as old:
        for entry in new.infolist():
            if not entry.filename.endswith("/byteorder"):
                old.writestr(entry, new.read(entry))
    assert plain_layout(io.BytesIO(raw.getvalue())) is not None
    assert torch.equal(read_chunk(tmp_path, stored(tmp_path, raw.getvalue())), PLAIN["float32"])


def test_a_block_that_is_no_tensor_is_refused_or_read_by_torch(tmp_path):
    for raw in (b"", b"PK" + bytes(500), saved(torch.ones(500))[:-200]):
        with pytest.raises(ValueError, match=r"__0_0\.distcp: corrupt at byte 1000"):
            read_chunk(tmp_path, stored(tmp_path, raw))
    assert plain_layout(io.BytesIO(saved({"a": torch.ones(3)}))) is None
    assert plain_layout(io.BytesIO(saved([1, None]))) is None


def test_damaged_framing_gives_a_tensor_no_larger_than_the_block_or_a_refusal(tmp_path):
    tensor, choice = torch.arange(64.0), random.Random(3)
    raw = saved(tensor)
    data = raw.index(tensor.numpy().tobytes())
    for _ in range(300):
        damaged = bytearray(raw)
        position = choice.choice([*range(data), *range(data + tensor.nbytes, len(raw))])
        damaged[position] ^= 1 << choice.randrange(8)
        with suppress(ValueError):
            read = read_chunk(tmp_path, stored(tmp_path, bytes(damaged)))
            assert isinstance(read, torch.Tensor)
            assert read.nbytes <= len(raw)


def test_nothing_but_tensors_comes_out_of_a_pickle(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "made"), "w"))

    raw = saved(Evil())
    assert plain_layout(io.BytesIO(raw)) is None
    with pytest.raises(ValueError, match="corrupt"):
        read_chunk(tmp_path, stored(tmp_path, raw))
    assert not (tmp_path / "made").exists()
