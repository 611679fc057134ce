"""Transport through a shared file system of what changed, which is applied to a copy beside each engine.

A version is written as a delta on the last one that every engine loaded. It is written whole at the first time, every
so many versions, and after one that broke off: nobody knows then which bytes the mirror and the engines' copies hold.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from slimrl.config.schema import DeltaEncoding
from slimrl.data.protocols import EngineControl, TensorSpec
from slimrl.models.versions.manifest import Manifest, VersionRef
from slimrl.resync.delta_writer import DeltaWriter
from slimrl.resync.mirror import Mirror
from slimrl.resync.transports.disk import DiskTransport
from slimrl.resync.version_writer import VersionWriter
from slimrl.resync.whole_writer import WholeWriter


class DeltaTransport(DiskTransport):
    """Implements Transport.

    Args:
        local_dir: folder of this run on the own disk of every node, for a copy of each engine and the sender's mirror.
        full_every: every so many versions one is written whole.
        encoding: of what changed.
    """

    def __init__(
        self,
        root: Path,
        specs: Sequence[TensorSpec],
        model_dir: Path,
        *,
        local_dir: Path,
        full_every: int,
        encoding: DeltaEncoding,
        file_bytes: int,
        keep: int,
        timeout_s: float,
    ) -> None:
        super().__init__(root, specs, model_dir, file_bytes=file_bytes, keep=keep, timeout_s=timeout_s)
        self._local_dir = local_dir.absolute()
        self._full_every, self._encoding = full_every, encoding
        self._mirror: Mirror | None = None
        self._base: VersionRef | None = None
        self._since_whole = 0

    def close(self) -> None:
        super().close()
        self._base = None
        if self._mirror is not None and not self._writing.locked():
            self._mirror.close()
            self._mirror = None

    def _open_writer(self, folder: Path, ref: VersionRef) -> VersionWriter:
        # Until every engine has loaded the version, neither the mirror nor their copies are a base to rely on.
        base, self._base = self._base, None
        if self._mirror is None:
            self._mirror = Mirror(self._local_dir, self._specs)
        due = self._since_whole + 1 >= self._full_every
        if base is None or due or base.version >= ref.version or not self._directory.has(base):
            return WholeWriter(
                folder, ref, self._specs, self._model_dir, file_bytes=self._file_bytes, mirror=self._mirror
            )
        return DeltaWriter(folder, ref, base, self._specs, mirror=self._mirror, encoding=self._encoding)

    def _copy_of(self, engine: EngineControl) -> str | None:
        return str(self._local_dir / re.sub(r"[^A-Za-z0-9_.-]", "_", engine.name))

    def _loaded(self, manifest: Manifest) -> None:
        self._base = manifest.ref
        self._since_whole = 0 if manifest.base is None else self._since_whole + 1
