"""The end of what a command writes, read in the event loop without a task or a thread."""

import asyncio
import os

KEPT_CHARS = 2000
"""Largest number of characters of a command's output in the cause of its failure"""
_KEPT_BYTES = 4 * KEPT_CHARS
_CHUNK_BYTES = 65536
_PIPE_BYTES = 1 << 20
"""Most bytes that a pipe holds"""
PAUSE_S = 0.01
"""Seconds between two chunks, so that a command that writes without end waits instead of the event loop"""


class OutputTail:
    """A pipe whose writing end a command gets. Raises OSError."""

    def __init__(self) -> None:
        self._read_end, write_end = os.pipe()
        self.write_end: int | None = write_end
        os.set_blocking(self._read_end, False)
        self._kept = b""
        self._loop = asyncio.get_running_loop()
        self._resuming: asyncio.TimerHandle | None = None
        self._resume()

    def started(self) -> None:
        """Close the writing end here, after the command has it."""
        if self.write_end is not None:
            os.close(self.write_end)
            self.write_end = None

    def end(self) -> str:
        """The last characters that were written so far; the command has ended."""
        for _ in range(_PIPE_BYTES // _CHUNK_BYTES):
            if not self._read():
                break
        return self._kept.decode(errors="replace").strip()[-KEPT_CHARS:]

    def close(self) -> None:
        self.started()
        if self._resuming is not None:
            self._resuming.cancel()
        self._loop.remove_reader(self._read_end)
        os.close(self._read_end)

    def _resume(self) -> None:
        self._loop.add_reader(self._read_end, self._read_some)

    def _read_some(self) -> None:
        self._loop.remove_reader(self._read_end)
        if self._read():
            self._resuming = self._loop.call_later(PAUSE_S, self._resume)

    def _read(self) -> bytes:
        """A chunk of what is there."""
        try:
            part = os.read(self._read_end, _CHUNK_BYTES)
        except BlockingIOError:
            return b""
        self._kept = (self._kept + part)[-_KEPT_BYTES:]
        return part
