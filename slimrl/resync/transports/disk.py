"""Transport through a shared file system: a folder for each version, which the engines load.

With `disk` every version is a Hugging Face checkpoint. With `delta` each engine has a copy on its node, and a version
is written as a delta on the last one that every engine loaded, which it applies to the copy. The first version is
written whole, every `full_every`-th, and each after a failed one, because then the bytes of the copies are unknown.
"""

import errno
import logging
import re
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slimrl.base.atomic import disk_reason
from slimrl.checkpoints.versions.directory import VersionDirectory
from slimrl.checkpoints.versions.manifest import VersionRef
from slimrl.config.schema.resync import ResyncConfig
from slimrl.data.model_weights import EngineControl, TensorPart, TensorSpec, packed_bytes
from slimrl.resync.engine_calls import fan_out
from slimrl.resync.ipc.shared_buffer import SharedBuffer
from slimrl.resync.transports.base import Transport
from slimrl.resync.version_writer import DeltaWriter, LastVersion, VersionWriter, WholeWriter

log = logging.getLogger(__name__)


class DiskTransport(Transport):
    """Writes each bucket as it comes; the engines load when the version is whole.

    Args:
        root: folder of this run's versions; trainer and engines reach it under this path.
        specs: all tensors that will be sent, in order.
        model_dir: checkpoint whose configuration, tokenizer and code go with the weights.
        local_dir: folder of this run on every node's own disk, for the copies of the engines and of rank 0; None
            without deltas.
    """

    def __init__(
        self,
        root: Path,
        specs: Sequence[TensorSpec],
        model_dir: Path,
        config: ResyncConfig,
        local_dir: Path | None = None,
    ) -> None:
        self._directory = VersionDirectory(root.absolute())
        self._specs, self._model_dir, self._config = specs, model_dir, config
        self._local_dir = local_dir.absolute() if local_dir else None
        self._last_version: LastVersion | None = None
        self._base: VersionRef | None = None
        self._since_whole = 0
        self._engines: Sequence[EngineControl] = ()
        self._writer: VersionWriter | None = None
        self._partial = Path()
        self._writing = threading.Lock()
        self._host: Tensor | None = None

    def begin(self, version: int, engines: Sequence[EngineControl]) -> None:
        """Begin an attempt at a version. Also raises OSError while a bucket of an earlier attempt is still being
        written, because the disk stalls."""
        if self._writing.locked():
            raise OSError(errno.EBUSY, "a bucket of an earlier attempt is still being written", str(self._partial))
        self._engines = engines
        self._drop_writer()
        with self._removed_if_broken():
            self._partial = self._directory.begin(version)
            self._writer = self._open_writer(self._partial, VersionRef(version=version, id=secrets.token_hex(8)))

    def send(self, parts: Sequence[TensorPart], buffer: SharedBuffer) -> None:
        assert self._writer is not None, "no version begun"
        # The caller may give up waiting before the write ends; the files must stay open until then.
        with self._writing, self._removed_if_broken():
            self._writer.write(parts, self._on_host(buffer.tensor[: packed_bytes(parts)]))

    def end(self, version: int) -> None:
        """Publish the version, have every engine load it, and remove what is no longer needed."""
        assert self._writer is not None, "no version begun"
        with self._removed_if_broken():
            manifest = self._writer.finish()
            self.written_bytes, self.changed_fraction = manifest.nbytes, self._writer.changed_fraction
        self._drop_writer()
        folder = self._directory.publish(self._partial, version)
        calls = {
            engine.name: partial(engine.load_version, str(folder), self._copy_of(engine)) for engine in self._engines
        }
        fan_out(calls, "load_version", self._config.timeout_s)
        self._base = manifest.ref
        self._since_whole = 0 if manifest.base is None else self._since_whole + 1
        self._directory.prune(self._config.keep)

    def close(self) -> None:
        if self._writing.locked():
            log.warning("%s: a bucket is still being written; the folder is left as it is", self._partial)
            return
        if self._writer is not None:
            self._drop_writer()
            self._directory.clean()
        if self._last_version is not None:
            self._last_version.close()
        self._host = self._last_version = self._base = None

    def _open_writer(self, folder: Path, ref: VersionRef) -> VersionWriter:
        # No version is a reliable base until every engine has loaded it.
        base, self._base = self._base, None
        if self._local_dir and self._last_version is None:
            self._last_version = LastVersion(self._local_dir, self._specs)
        due = self._since_whole + 1 >= self._config.full_every
        if self._last_version and base and not due and base.version < ref.version and self._directory.has(base):
            encoding = self._config.delta_encoding
            return DeltaWriter(folder, ref, base, self._specs, last_version=self._last_version, encoding=encoding)
        return WholeWriter(
            folder,
            ref,
            self._specs,
            self._model_dir,
            file_bytes=self._config.bucket_bytes,
            last_version=self._last_version,
        )

    def _copy_of(self, engine: EngineControl) -> str | None:
        """Folder of the engine's copy of the weights; None for an engine that loads the version itself."""
        if self._local_dir is None:
            return None
        return str(self._local_dir / re.sub(r"[^A-Za-z0-9_.-]", "_", engine.name))

    @contextmanager
    def _removed_if_broken(self) -> Iterator[None]:
        """Remove the unfinished version at once after an error, to free a full disk; the error names the folder."""
        try:
            yield
        except OSError as error:
            self._drop_writer()
            self._directory.clean()
            raise OSError(error.errno, disk_reason(error), error.filename or str(self._directory.root)) from error

    def _drop_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _on_host(self, data: Tensor) -> np.ndarray:
        if data.is_cuda:
            if self._host is None or len(self._host) < len(data):
                self._host = torch.empty(len(data), dtype=torch.uint8, pin_memory=True)
            data = self._host[: len(data)].copy_(data)
        return data.numpy()
