"""The last words of a process: the end of its standard error, for the message that says why it ended."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TextIO

KEPT_BYTES = 2000


class StderrTail:
    def __init__(self) -> None:
        self._kept = b""

    @property
    def text(self) -> str:
        return self._kept.decode(errors="replace").strip()

    @asynccontextmanager
    async def file(self) -> AsyncIterator[TextIO]:
        """A file to give to a process as its standard error; read until the context is left."""
        read_end, write_end = os.pipe()
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb")
        )
        reading = asyncio.create_task(self._read(reader))
        try:
            with os.fdopen(write_end, "w") as file:
                yield file
        finally:
            # Processes that the server left behind may hold the pipe open.
            await asyncio.wait([reading], timeout=0.1)
            reading.cancel()
            transport.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while chunk := await reader.read(4096):
            self._kept = (self._kept + chunk)[-KEPT_BYTES:]
