"""Changes of a block of a tensor, as one zstd frame.

A block is a run of E elements of 1, 2, 4 or 8 bytes, compared as bits. Numbers are little-endian. In a frame the bytes
of elements lie in planes: first the lowest byte of every element, then the second lowest, and so on, because bits that
change alike compress better together.

- `xor`: the E exclusive ors of old and new elements. Equal elements give zeros. Smallest where most elements change a
  little, as in float32. It must be applied once, and to exactly the bytes that it was made from.
- `overwrite`: the elements that changed, C of them, of pages of 65,536 elements: how many there are in each page
  (uint32), C gaps (uint16), and C new elements. A gap is the distance of an element's place from that of the changed
  element before it, modulo 65,536; the first counts from the block's start. Fastest where few elements change, as in
  bfloat16.
"""

import os
import threading
from collections.abc import Iterator

import numpy as np
import zstandard

from slimrl.config.schema.resync import DeltaEncoding

BLOCK_BYTES = 4 * 1024**2
"""Most bytes of a tensor in one frame: a few of them fit into a processor's cache."""

ZSTD_LEVEL = 1
"""zstd's compression level: higher ones take at least twice as long and save almost nothing."""

MAX_WORKERS = 8
"""Most threads that encode, apply or hash; with more, disks and memory are the limit."""

_PAGE_BITS = 16
_MAX_PAYLOAD_BYTES = 4 * BLOCK_BYTES
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def num_workers() -> int:
    """Number of worker threads: one for each core of this process, at most MAX_WORKERS."""
    return min(MAX_WORKERS, len(os.sched_getaffinity(0)))


def block_ranges(nbytes: int, start: int = 0) -> Iterator[tuple[int, int]]:
    """Byte ranges of at most BLOCK_BYTES that cover `nbytes` bytes from `start` on."""
    for first in range(start, start + nbytes, BLOCK_BYTES):
        yield first, min(first + BLOCK_BYTES, start + nbytes)


class BlockCodec(threading.local):
    """Encodes and decodes blocks of one encoding, with other memory in each thread."""

    def __init__(self, encoding: DeltaEncoding) -> None:
        self._encoding = encoding
        self.buffer = np.empty(BLOCK_BYTES, dtype=np.uint8)
        """Buffer for the block that the thread works on."""
        self.changed_elements = 0
        """Number of changed elements that the last `encode` found"""
        self._compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=True)
        self._decompressor = zstandard.ZstdDecompressor()

    def encode(self, old: np.ndarray, new: np.ndarray, element_bytes: int) -> bytes | None:
        """The frame that makes `old` into `new`; None where they are equal.

        Args:
            old: uint8 [N], N a multiple of `element_bytes`.
            new: the same.
        """
        old_E, new_E = old.view(_BITS[element_bytes]), new.view(_BITS[element_bytes])
        self.changed_elements = 0
        if np.array_equal(old_E, new_E):
            return None
        if self._encoding == DeltaEncoding.xor:
            flipped_E = old_E ^ new_E
            self.changed_elements = int(np.count_nonzero(flipped_E))
            return self._compressor.compress(_planes(flipped_E))
        positions_C = np.flatnonzero(old_E != new_E)
        self.changed_elements = len(positions_C)
        return self._compressor.compress(_overwrite(positions_C, new_E))

    def apply(self, frame: bytes | memoryview, block: np.ndarray, element_bytes: int) -> None:
        """Make the old block, uint8 [N], into the new one.

        Raises:
            ValueError: the frame is damaged, or of a block of another size.
        """
        block_E = block.view(_BITS[element_bytes])
        try:
            if zstandard.get_frame_parameters(frame).content_size > _MAX_PAYLOAD_BYTES:
                raise ValueError("a damaged frame: it has more bytes than a block can have")
            payload = np.frombuffer(self._decompressor.decompress(frame), dtype=np.uint8)
        except zstandard.ZstdError as error:
            raise ValueError(f"a damaged frame: {error}") from error
        if self._encoding == DeltaEncoding.xor:
            if len(payload) != len(block):
                raise ValueError(f"a frame of a block of {len(payload)} bytes for a block of {len(block)} bytes")
            block_E ^= _elements(payload, element_bytes)
        else:
            positions_C, values_C = _changed(payload, len(block_E), element_bytes)
            block_E[positions_C] = values_C


def _overwrite(positions_C: np.ndarray, new_E: np.ndarray) -> bytes:
    counts_P = np.bincount(positions_C >> _PAGE_BITS, minlength=_num_pages(len(new_E))).astype("<u4")
    gaps_C = np.diff(positions_C, prepend=0).astype("<u2")
    return b"".join([counts_P.tobytes(), _planes(gaps_C), _planes(new_E[positions_C])])


def _changed(payload: np.ndarray, num_elements: int, element_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions int64 [C], ascending, and new elements [C]."""
    num_pages = _num_pages(num_elements)
    counts_P = payload[: 4 * num_pages].view("<u4") if len(payload) >= 4 * num_pages else None
    count = int(counts_P.sum()) if counts_P is not None else 0
    values_start = 4 * num_pages + 2 * count
    if counts_P is None or len(payload) != values_start + count * element_bytes:
        raise ValueError(f"a frame of a block of another size for a block of {num_elements} elements")
    in_page_C = np.cumsum(_elements(payload[4 * num_pages : values_start], 2), dtype=np.uint16)
    positions_C = np.repeat(np.arange(num_pages, dtype=np.int64) << _PAGE_BITS, counts_P) + in_page_C
    if count and positions_C[-1] >= num_elements:
        raise ValueError(f"a frame that changes element {positions_C[-1]} of {num_elements}")
    return positions_C, _elements(payload[values_start:], element_bytes)


def _num_pages(num_elements: int) -> int:
    return -(-num_elements >> _PAGE_BITS) if num_elements else 0


def _planes(elements_E: np.ndarray) -> bytes:
    return elements_E.view(np.uint8).reshape(-1, elements_E.itemsize).T.tobytes()


def _elements(planes: np.ndarray, element_bytes: int) -> np.ndarray:
    """The inverse of `_planes`."""
    bytes_EB = np.empty((len(planes) // element_bytes, element_bytes), dtype=np.uint8)
    for index, plane_E in enumerate(planes.reshape(element_bytes, -1)):
        bytes_EB[:, index] = plane_E
    return bytes_EB.reshape(-1).view(_BITS[element_bytes])
