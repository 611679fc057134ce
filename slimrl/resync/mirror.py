"""The bytes of the version that was sent last, in a file on the sender's own disk."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from slimrl.data.protocols import TensorSpec
from slimrl.models.safetensors_file import spec_bytes, write_at
from slimrl.models.versions.blocks import read_at


class Mirror:
    """All tensors one after the other in a file without a name, which goes when the process does.

    Its pages are the kernel's to drop and to read again, so it takes no memory that anything else needs.

    Raises:
        OSError: the folder's disk has no room for it.
    """

    def __init__(self, folder: Path, specs: Sequence[TensorSpec]) -> None:
        self._folder = folder
        self._starts: dict[str, int] = {}
        end = 0
        for spec in specs:
            self._starts[spec.name] = end
            end += spec_bytes(spec)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor, name = tempfile.mkstemp(dir=folder, prefix="mirror-")
        except OSError as error:
            raise OSError(error.errno, f"resync.local_dir: {error.strerror}", str(folder)) from error
        os.unlink(name)
        try:
            os.posix_fallocate(self._descriptor, 0, end)
        except OSError as error:
            os.close(self._descriptor)
            raise OSError(error.errno, f"resync.local_dir: {error.strerror}", str(folder)) from error

    def read(self, name: str, start: int, out: np.ndarray) -> None:
        """Fill `out`, uint8, with a tensor's bytes from `start` on."""
        read_at(self._descriptor, self._folder, out, self._starts[name] + start)

    def write(self, name: str, start: int, data: np.ndarray) -> None:
        write_at(self._descriptor, data.data, self._starts[name] + start)

    def close(self) -> None:
        os.close(self._descriptor)
