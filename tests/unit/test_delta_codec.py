"""Frames of changed blocks: what they make of the old block, and what they refuse."""

import numpy as np
import pytest
import zstandard

from slimrl.checkpoints.versions.codec import BLOCK_BYTES, BlockCodec
from slimrl.config.schema.resync import DeltaEncoding

ENCODINGS = list(DeltaEncoding)


def changed_copy(old: np.ndarray, element_bytes: int, share: float, seed: int = 0) -> np.ndarray:
    """With about `share` of the elements other than before."""
    random = np.random.default_rng(seed)
    new = old.copy().reshape(-1, element_bytes)
    rows = random.random(len(new)) < share
    new[rows] ^= random.integers(1, 256, (int(rows.sum()), element_bytes), dtype=np.uint8)
    return new.reshape(-1)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("element_bytes", [1, 2, 4, 8])
@pytest.mark.parametrize("share", [1e-5, 0.02, 1.0])
@pytest.mark.parametrize("num_elements", [1, 7, 65_536, 200_001])
def test_a_frame_makes_the_old_block_into_the_new_one(encoding, element_bytes, share, num_elements):
    old = np.random.default_rng(1).integers(0, 256, num_elements * element_bytes, dtype=np.uint8)
    new = changed_copy(old, element_bytes, share)
    new[-1] ^= 1
    frame = BlockCodec(encoding).encode(old, new, element_bytes)
    assert frame is not None
    block = old.copy()
    BlockCodec(encoding).apply(frame, block, element_bytes)
    assert np.array_equal(block, new)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_equal_blocks_have_no_frame(encoding):
    block = np.arange(256, dtype=np.uint8)
    assert BlockCodec(encoding).encode(block, block.copy(), 2) is None


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_gaps_of_more_than_a_page_are_kept(encoding):
    old = np.zeros(BLOCK_BYTES, dtype=np.uint8)
    new = old.copy()
    new.view(np.uint16)[[0, 65_535, 65_536, 400_000, 2_097_151]] = [1, 2, 3, 4, 5]
    frame = BlockCodec(encoding).encode(old, new, 2)
    BlockCodec(encoding).apply(frame, old, 2)
    assert np.array_equal(old, new)
    assert len(frame) < 1000


def test_overwriting_does_not_depend_on_the_base_where_it_changes():
    old = np.zeros(4096, dtype=np.uint8)
    new = changed_copy(old, 2, 0.1)
    frame = BlockCodec(DeltaEncoding.overwrite).encode(old, new, 2)
    codec = BlockCodec(DeltaEncoding.overwrite)
    for _ in range(2):
        codec.apply(frame, old, 2)
    assert np.array_equal(old, new)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_damaged_or_misplaced_frame_is_refused(encoding):
    old = np.random.default_rng(1).integers(0, 256, 40_000, dtype=np.uint8)
    frame = BlockCodec(encoding).encode(old, changed_copy(old, 2, 0.3), 2)
    codec = BlockCodec(encoding)
    with pytest.raises(ValueError, match="damaged frame"):
        codec.apply(frame[: len(frame) // 2], old.copy(), 2)
    for position in range(0, len(frame), len(frame) // 50):
        broken = bytearray(frame)
        broken[position] ^= 0x40
        with pytest.raises(ValueError, match="frame"):
            codec.apply(bytes(broken), old.copy(), 2)
    with pytest.raises(ValueError, match=r"for a block of|changes element"):
        codec.apply(frame, old[:30_000].copy(), 2)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_frame_of_more_than_a_block_can_have_is_refused_before_it_takes_memory(encoding):
    frame = zstandard.ZstdCompressor().compress(bytes(4 * BLOCK_BYTES + 1))
    assert len(frame) < 10_000
    with pytest.raises(ValueError, match="a damaged frame: it has more bytes than a block can have"):
        BlockCodec(encoding).apply(frame, np.zeros(8, dtype=np.uint8), 2)


def test_an_element_beyond_the_block_is_not_overwritten():
    old = np.zeros(200, dtype=np.uint8)
    new = old.copy()
    new[190] = 1
    frame = BlockCodec(DeltaEncoding.overwrite).encode(old, new, 2)
    with pytest.raises(ValueError, match="changes element 95 of 95"):
        BlockCodec(DeltaEncoding.overwrite).apply(frame, np.zeros(190, dtype=np.uint8), 2)


def test_sparse_changes_take_little_and_small_changes_of_float32_take_less_than_themselves():
    random = np.random.default_rng(0)
    old = random.normal(0, 0.02, 500_000).astype(np.float32)
    new = (old + random.normal(0, 1e-6, len(old))).astype(np.float32)
    dense = BlockCodec(DeltaEncoding.xor).encode(old.view(np.uint8), new.view(np.uint8), 4)
    assert len(dense) < 0.5 * old.nbytes
    halves = old.view(np.uint16).copy()
    halves[random.random(len(halves)) < 0.01] ^= 1
    for encoding in ENCODINGS:
        sparse = BlockCodec(encoding).encode(old.view(np.uint8), halves.view(np.uint8), 2)
        assert len(sparse) < 0.025 * old.nbytes
