"""A checkpoint under way on one rank: megatron-core has planned who writes what, and the files are not there yet."""

import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path

import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from slimrl.base.errors import NotWritten
from slimrl.checkpoints.digests import FileDigest, file_digests

_OF_RANK = re.compile(r"__(\d+)_\d+\.distcp|rng/(\d+)\.pt")
"""Names of the files that each rank writes; rank 0 writes all others."""


class CheckpointWriting:
    """`write`, of each rank for itself, then `finish`, of all together. `write` may run in a thread after `stage`."""

    def __init__(self, partial: Path, directory: Path, rank: int, request: AsyncRequest, *, leads: bool) -> None:
        """
        Args:
            partial: folder that is written into.
            directory: its final name.
            request: megatron-core's plan.
            leads: whether this rank gives the folder its name.
        """
        self._leads = leads
        self._partial, self._directory, self._rank = partial, directory, rank
        self._function, self._finalize = request.async_fn, request.finalize_fns
        self._arguments, self._preload = list(request.async_fn_args), request.preload_fn
        self._digests: dict[str, FileDigest] = {}

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
        """Write this rank's files and take their checksums. What megatron-core's writer meets, such as a full disk, is
        raised by `finish`, on all ranks."""
        if self._function is not None:
            if self._preload is not None:
                self._arguments[1][:] = self._preload()
            self._function(*self._arguments)
            # Their memory; only how many there are is asked for later.
            self._arguments[1][:] = [None] * len(self._arguments[1])
        self._digests = file_digests(self._partial, _written_by(self._partial, self._rank))

    def finish(self) -> dict[str, FileDigest]:
        """Complete the checkpoint and give it its name.

        Returns:
            Checksums of the files that this rank wrote, by name in the folder.

        Raises:
            NotWritten: a rank could not write, for example to a full disk; on all ranks.
            OSError: a file cannot be read back, or the folder not renamed.
        """
        dist.barrier()
        try:
            for function in self._finalize:
                function()
        except CheckpointException as error:
            # The exception's own text is a traceback of every rank.
            raise NotWritten("; ".join(sorted({str(cause) for cause, _ in error.failures.values()}))) from error
        dist.barrier()
        # Before the rename: a network file system may not show this rank the final name at once.
        late = [name for name in _written_by(self._partial, self._rank) if name not in self._digests]
        digests = dict(sorted({**self._digests, **file_digests(self._partial, late)}.items()))
        dist.barrier()
        if self._leads:
            os.rename(self._partial, self._directory)
        dist.barrier()
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
