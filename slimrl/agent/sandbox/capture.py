"""Collects what a run writes to its pipes, up to a limit, without a thread or a task."""

import asyncio
import os

CHUNK_BYTES = 65536


class Capture:
    """Two pipes, whose write ends a process gets as stdout and stderr. Used within one event loop.

    Args:
        limit_bytes: of both together. Above it `full` is set and nothing more is read, so a writer blocks.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._limit_bytes = limit_bytes
        self.full = asyncio.Event()
        self._chunks: dict[int, bytearray] = {}
        self.write_ends: list[int] = []
        for _ in range(2):
            read_end, write_end = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(read_end, False)
            self._chunks[read_end] = bytearray()
            self.write_ends.append(write_end)
            self._loop.add_reader(read_end, self._read, read_end)

    def started(self) -> None:
        """Close the write ends here, after the process has them."""
        while self.write_ends:
            os.close(self.write_ends.pop())

    def take(self) -> tuple[str, str]:
        """What has been written since the last call, (stdout, stderr)."""
        for read_end in self._chunks:
            self._read(read_end)
        stdout, stderr = (chunk.decode("utf-8", "replace") for chunk in self._chunks.values())
        for chunk in self._chunks.values():
            chunk.clear()
        return stdout, stderr

    def close(self) -> None:
        self.started()
        for read_end in self._chunks:
            self._loop.remove_reader(read_end)
            os.close(read_end)
        self._chunks = {}

    def _read(self, read_end: int) -> None:
        """All that is there, as far as the limit."""
        while not self.full.is_set():
            room = self._limit_bytes - sum(map(len, self._chunks.values()))
            try:
                chunk = os.read(read_end, min(CHUNK_BYTES, room + 1))
            except BlockingIOError:
                return
            if not chunk:
                break
            self._chunks[read_end] += chunk[:room]
            if len(chunk) > room:
                self.full.set()
        self._loop.remove_reader(read_end)
