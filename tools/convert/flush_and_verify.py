"""Flushes, verifies and records written files in threads, while the next file is written.

1. While a file is written, one thread flushes it to the disk step by step. The disk is busy from the start, and little
   is left at the end of a file.
2. Another thread reads back each flushed step and compares it with the checksums.
3. When a file is whole, the rest of it is flushed and verified, and then its record is written.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from slimrl_tools.progress import Advance

from slimrl.checkpoints.digests import Span, check_spans

STEP_BYTES = 256 * 10**6
"""Written before the next step is flushed, once the last one is on the disk."""

MAX_UNFLUSHED_BYTES = 10**9
"""Written before the last step is waited for; bounds the system's memory of unflushed pages."""


class FlushAndVerify:
    """A context manager, which waits for the last file. Files are written one after the other.

    Verification may read from the page cache.

    Args:
        compared: counts the bytes that are compared; None to read nothing back.

    Raises:
        OSError: the disk failed, or a file reads back differently. `finish` of a later file or the end of the block
            raises it; the file gets no record.
    """

    def __init__(self, compared: Advance | None) -> None:
        self._compared = compared
        self._disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="disk")
        self._check = ThreadPoolExecutor(max_workers=1, thread_name_prefix="check")
        self._sync: Future[None] | None = None
        """The last flush."""
        self._unflushed: list[Span] = []
        self._unflushed_bytes = 0
        self._failure: BaseException | None = None

    def written(self, descriptor: int, file: Path, span: Span) -> None:
        """Call after `span` is written.

        Args:
            descriptor: of the file, open for reading and writing.
            file: its final name.
        """
        self._unflushed.append(span)
        self._unflushed_bytes += span.length
        if self._unflushed_bytes >= MAX_UNFLUSHED_BYTES and self._sync is not None:
            wait([self._sync])
        if self._unflushed_bytes >= STEP_BYTES and (self._sync is None or self._sync.done()):
            self._submit(os.dup(descriptor), file, None)

    def finish(self, file: Path, record: Callable[[], None]) -> None:
        """Call when the file is whole and has its name. A thread calls `record` once it is flushed and verified."""
        self._raise()
        self._submit(os.open(file, os.O_RDONLY), file, record)

    def _submit(self, descriptor: int, file: Path, record: Callable[[], None] | None) -> None:
        spans, self._unflushed, self._unflushed_bytes = self._unflushed, [], 0
        self._sync = self._disk.submit(os.fsync, descriptor)
        self._check.submit(self._step, self._sync, descriptor, file, spans, record)

    def _step(
        self,
        sync: Future[None],
        descriptor: int,
        file: Path,
        spans: Sequence[Span],
        record: Callable[[], None] | None,
    ) -> None:
        try:
            # In any case, since the flush uses the descriptor.
            sync.result()
            if self._failure is not None:
                return
            if self._compared is not None:
                check_spans(descriptor, file, spans, self._compared)
            if record is not None:
                record()
        except BaseException as error:  # noqa: BLE001 - the writing thread raises it
            # Later steps get no record: they may belong to this file.
            self._failure = self._failure or error
        finally:
            os.close(descriptor)

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure

    def __enter__(self) -> "FlushAndVerify":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._disk.shutdown()
        self._check.shutdown()
        if kind is None:
            self._raise()
