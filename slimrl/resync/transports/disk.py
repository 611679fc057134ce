"""Transport through a shared file system: every version a Hugging Face checkpoint, which the engines reload."""

import errno
import logging
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slimrl.data.protocols import BucketSpec, EngineControl, GroupSpec, TensorSpec
from slimrl.models.shared_buffer import SharedBuffer
from slimrl.models.versions.directory import VersionDirectory
from slimrl.models.versions.manifest import Manifest, VersionRef
from slimrl.resync.fan_out import fan_out
from slimrl.resync.live import LiveTensors
from slimrl.resync.transports.base import Written
from slimrl.resync.version_writer import VersionWriter
from slimrl.resync.whole_writer import WholeWriter

log = logging.getLogger(__name__)


class DiskTransport:
    """Implements Transport. A bucket is written as it comes; the engines load when the version is whole.

    Args:
        root: folder of this run's versions, which trainer and engines reach under this path.
        specs: all tensors that will be sent, in order.
        model_dir: checkpoint whose configuration, tokenizer and code go with the weights.
        file_bytes: most bytes of one file of a checkpoint.
        keep: newest versions that are kept.
        timeout_s: deadline of an engine's reload.
    """

    overlapping = False
    in_place_bytes: int | None = None
    group: GroupSpec | None = None

    def __init__(
        self,
        root: Path,
        specs: Sequence[TensorSpec],
        model_dir: Path,
        *,
        file_bytes: int,
        keep: int,
        timeout_s: float,
    ) -> None:
        self._directory = VersionDirectory(root.absolute())
        self._specs, self._model_dir, self._file_bytes = specs, model_dir, file_bytes
        self._keep, self._timeout_s = keep, timeout_s
        self._engines: Sequence[EngineControl] = ()
        self.written: Written | None = None
        self._writer: VersionWriter | None = None
        self._partial = Path()
        self._writing = threading.Lock()
        self._host: Tensor | None = None

    def connect(self, engines: Sequence[EngineControl], num_sources: int) -> None:
        self._engines = engines

    def begin(self, version: int) -> None:
        """Raises OSError too while a bucket of an earlier attempt is still being written: the disk stalls."""
        if self._writing.locked():
            raise OSError(errno.EBUSY, "a bucket sent earlier is still being written", str(self._partial))
        self._drop_writer()
        with self._removed_if_broken():
            self._partial = self._directory.begin(version)
            self._writer = self._open_writer(self._partial, VersionRef(version=version, id=secrets.token_hex(8)))

    def send(self, bucket: BucketSpec, buffer: SharedBuffer, live: LiveTensors) -> None:
        assert self._writer is not None, "no version begun"
        # Who waits for a send may give up before it ends, and its files must stay open until then.
        with self._writing, self._removed_if_broken():
            self._writer.write(bucket, self._on_host(buffer.tensor[: bucket.nbytes]))

    def arrived(self) -> None:
        """Nothing is left to do before the version is whole."""

    def finish_calls(self) -> None:
        """None outlasts the method that makes it."""

    def end(self, version: int) -> None:
        """Publish the version, have every engine load it, and remove what is no longer needed."""
        assert self._writer is not None, "no version begun"
        with self._removed_if_broken():
            manifest = self._writer.finish()
            self.written = Written(nbytes=sum(manifest.files.values()), changed_fraction=self._writer.changed_fraction)
        self._drop_writer()
        folder = self._directory.publish(self._partial, version)
        calls = {
            engine.name: partial(engine.load_version, str(folder), self._copy_of(engine)) for engine in self._engines
        }
        fan_out(calls, "load_version", self._timeout_s)
        self._loaded(manifest)
        self._directory.prune(self._keep)

    def close(self) -> None:
        if self._writing.locked():
            log.warning("%s: a bucket is still being written; it is left as it is", self._partial)
            return
        if self._writer is not None:
            self._drop_writer()
            self._directory.clean()
        self._host = None

    def _open_writer(self, folder: Path, ref: VersionRef) -> VersionWriter:
        return WholeWriter(folder, ref, self._specs, self._model_dir, file_bytes=self._file_bytes)

    def _copy_of(self, engine: EngineControl) -> str | None:
        """Folder of the engine's copy of the weights; None for an engine that loads the version itself."""
        return None

    def _loaded(self, manifest: Manifest) -> None:
        """Every engine has this version."""

    @contextmanager
    def _removed_if_broken(self) -> Iterator[None]:
        """A full disk gets back at once what a version has taken that is never whole; the error names the folder."""
        try:
            yield
        except OSError as error:
            self._drop_writer()
            self._directory.clean()
            reason = "no space left on the disk" if error.errno == errno.ENOSPC else error.strerror
            raise OSError(error.errno, reason, error.filename or str(self._directory.root)) from error

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
