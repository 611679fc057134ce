"""A checkpoint under way on one rank: megatron-core has planned who writes what, and the files are not there yet."""

import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from torch import Tensor

from slimrl.checkpoints.digests import FileDigest, file_digests
from slimrl.trainer.checkpointing.failures import failing_together

_OF_RANK = re.compile(r"__(\d+)_\d+\.distcp|rng/(\d+)\.pt")
"""Names of the files that each rank writes; rank 0 writes all others."""


class CheckpointWriting:
    """`write`, of each rank for itself, then `finish`, of all together. `write` may run in a thread after `stage`."""

    def __init__(
        self, partial: Path, directory: Path, rank: int, rng: bytes, request: AsyncRequest, *, leads: bool
    ) -> None:
        """
        Args:
            partial: folder that is written into.
            directory: its final name.
            rng: contents of the file of this rank's random-number states.
            request: megatron-core's plan.
            leads: whether this rank gives the folder its name.
        """
        self._leads = leads
        self._partial, self._directory, self._rank, self._rng = partial, directory, rank, rng
        # The second one writes `CONFIG_NAME` on the first rank while the others wait; `begin` has written it.
        self._function, (self._finalize, _) = request.async_fn, request.finalize_fns
        self._arguments, self._preload = list(request.async_fn_args), request.preload_fn
        self._digests: dict[str, FileDigest] = {}
        self._failure: OSError | None = None
        """What this rank's `write` met outside megatron-core"""

    def stage(self, live: Collection[int]) -> None:
        """Copy into host memory what training changes, so that it may go on.

        Args:
            live: addresses of the storages of weights and optimizer (`storage_addresses`).
        """
        if self._function is None:
            return
        self._preload = None
        # In place: what completes the checkpoint holds the same list.
        self._arguments[1][:] = [
            (file, key, (texts, [(item, _on_host(tensor, live)) for item, tensor in tensors]))
            for file, key, (texts, tensors) in self._arguments[1]
        ]

    def write(self) -> None:
        """Write this rank's files and take their checksums. What cannot be written, for example to a full disk, is
        raised by `finish`, on all ranks."""
        if self._function is not None:
            if self._preload is not None:
                self._arguments[1][:] = self._preload()
            self._function(*self._arguments)
            # Their memory; only how many there are is asked for later.
            self._arguments[1][:] = [None] * len(self._arguments[1])
        try:
            (self._partial / "rng" / f"{self._rank:05d}.pt").write_bytes(self._rng)
            self._digests = file_digests(self._partial, _written_by(self._partial, self._rank))
        except OSError as error:
            self._failure = error

    def finish(self) -> dict[str, FileDigest]:
        """Complete the checkpoint and give it its name.

        Returns:
            Checksums of the files that this rank wrote, by name in the folder.

        Raises:
            NotWritten: a rank could not write, for example to a full disk, or read a file back, or rename the folder;
                on all ranks, none of which is writing then.
        """
        # Before the rename: a network file system may not show this rank the final name at once.
        with failing_together():
            self._finalize()
            if self._failure is not None:
                raise self._failure
            late = [name for name in _written_by(self._partial, self._rank) if name not in self._digests]
            digests = dict(sorted({**self._digests, **file_digests(self._partial, late)}.items()))
        with failing_together():
            if self._leads:
                os.rename(self._partial, self._directory)
        return digests


def storage_addresses(tensors: Iterable[Tensor]) -> set[int]:
    """Addresses of the tensors' storages."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def _written_by(directory: Path, rank: int) -> list[str]:
    """Names of the files of a checkpoint that a rank writes."""
    names = (str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
    return sorted(name for name in names if _writer(name) == rank)


def _writer(name: str) -> int:
    match = _OF_RANK.fullmatch(name)
    return int(match[1] or match[2]) if match else 0


def _on_host(tensor: Tensor, live: Collection[int]) -> Tensor:
    """A tensor in host memory that training does not change."""
    if tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() not in live:
        return tensor
    return tensor.detach().to("cpu", copy=True)
