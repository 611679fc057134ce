"""The bytes of the version that was sent last, in a file on the sender's own disk."""

import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path

import numpy as np

from slimrl.checkpoints.safetensors_file import spec_bytes, write_at
from slimrl.checkpoints.tensor_bytes import fill
from slimrl.data.weights import TensorSpec


class LastVersion:
    """All tensors one after the other in an unlinked file, which the kernel removes when the process ends.

    Its pages are page cache, so it takes no memory that anything else needs.

    Raises:
        OSError: the folder's disk has no room for it.
    """

    def __init__(self, folder: Path, specs: Sequence[TensorSpec]) -> None:
        self._folder = folder
        *starts, end = accumulate(map(spec_bytes, specs), initial=0)
        self._starts = {spec.name: start for spec, start in zip(specs, starts, strict=True)}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - see close
            with ExitStack() as if_full:
                if_full.callback(self._file.close)
                os.posix_fallocate(self._file.fileno(), 0, end)
                if_full.pop_all()
        except OSError as error:
            raise OSError(error.errno, f"resync.local_dir: {error.strerror}", str(folder)) from error

    def read(self, name: str, start: int, out: np.ndarray) -> None:
        """Fill `out`, uint8, with a tensor's bytes from `start` on."""
        fill(self._file.fileno(), self._folder, out.data, self._starts[name] + start)

    def write(self, name: str, start: int, data: np.ndarray) -> None:
        write_at(self._file.fileno(), data.data, self._starts[name] + start)

    def close(self) -> None:
        self._file.close()
