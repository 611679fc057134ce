"""What a written file still has to go through, in threads beside the writing of the next: disk, check, record.

1. While a file is written, one thread sends what is in it to the disk, step by step. So the disk is busy from the
   start, and little is left at the end of a file.
2. Another reads back each step that is there, and compares it with the checksums of what was written.
3. When a file is whole, the rest of it goes the same way, and then its record is written.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from slimrl_tools.progress import Advance

from slimrl.models.digests import Span, check_spans

STEP_BYTES = 256 * 10**6
"""Written before there is a step, unless the last one is not on the disk yet."""

BEHIND_BYTES = 10**9
"""Written before the last step is waited for, so that the memory of the system does not fill with what is not on the
disk yet."""


class Finisher:
    """A context manager, which waits for the last file. Files are written one after the other.

    What is read back may come from the memory of the system.

    Args:
        compared: counts the bytes that are compared; None: nothing is read back.

    Raises:
        OSError: the disk failed, or a file reads back differently; from `finish`, that of a later file too, or at the
            end. Of that file no record is written.
    """

    def __init__(self, compared: Advance | None) -> None:
        self._compared = compared
        self._disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="disk")
        self._check = ThreadPoolExecutor(max_workers=1, thread_name_prefix="check")
        self._syncs: list[Future[None]] = []
        self._steps: list[Future[None]] = []
        self._due: list[Span] = []
        self._due_bytes = 0
        self._failed = False

    def written(self, descriptor: int, file: Path, span: Span) -> None:
        """`span` of the file is written.

        Args:
            descriptor: of the file, open for reading and writing.
            file: the name that it will have.
        """
        self._due.append(span)
        self._due_bytes += span.length
        if self._due_bytes >= BEHIND_BYTES:
            wait(self._syncs)
        if self._due_bytes >= STEP_BYTES and all(sync.done() for sync in self._syncs):
            self._submit(os.dup(descriptor), file, None)

    def finish(self, file: Path, record: Callable[[], None]) -> None:
        """The file is whole and has its name; `record` is called, in a thread, when it is on the disk and checked."""
        self._raise([step for step in self._steps if step.done()])
        self._submit(os.open(file, os.O_RDONLY), file, record)

    def _submit(self, descriptor: int, file: Path, record: Callable[[], None] | None) -> None:
        spans, self._due, self._due_bytes = self._due, [], 0
        sync = self._disk.submit(os.fsync, descriptor)
        self._syncs = [*(earlier for earlier in self._syncs if not earlier.done()), sync]
        self._steps.append(self._check.submit(self._step, sync, descriptor, file, spans, record))

    def _step(
        self,
        sync: Future[None],
        descriptor: int,
        file: Path,
        spans: Sequence[Span],
        record: Callable[[], None] | None,
    ) -> None:
        try:
            # Waited for in any case, since it uses the descriptor.
            sync.result()
            if self._failed:
                return
            if self._compared is not None:
                check_spans(descriptor, file, spans, self._compared)
            if record is not None:
                record()
        except BaseException:
            # No record is written of what comes behind, which may be the rest of this file.
            self._failed = True
            raise
        finally:
            os.close(descriptor)

    def _raise(self, steps: Sequence[Future[None]]) -> None:
        """Wait for steps, and raise what the first to fail has raised."""
        self._steps = [step for step in self._steps if step not in steps]
        for step in steps:
            step.result()

    def __enter__(self) -> "Finisher":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._raise(self._steps)
        finally:
            self._disk.shutdown()
            self._check.shutdown()
