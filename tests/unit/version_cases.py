"""Versions of a few small tensors, a transport that writes them and an engine that loads them: for tests of folders."""

from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file
from torch import Tensor

from slimrl.checkpoints.safetensors_folder import SafetensorsFolder
from slimrl.checkpoints.versions.directory import VersionDirectory
from slimrl.checkpoints.versions.local_copy import LocalCopy
from slimrl.checkpoints.versions.manifest import read_manifest
from slimrl.config.schema.resync import DeltaEncoding, ResyncConfig
from slimrl.data.engine import EngineError
from slimrl.data.model_weights import TensorPart, TensorSpec
from slimrl.resync.transports.disk import DiskTransport

SPECS = [
    TensorSpec(name="embed", shape=(50, 8), dtype="bfloat16"),
    TensorSpec(name="norm", shape=(8,), dtype="float32"),
    TensorSpec(name="big", shape=(300, 10), dtype="float32"),
    TensorSpec(name="scalar", shape=(), dtype="float32"),
    TensorSpec(name="head", shape=(40, 8), dtype="bfloat16"),
]


def random_weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {spec.name: torch.randn(spec.shape, generator=generator).to(getattr(torch, spec.dtype)) for spec in SPECS}


def with_changes(weights: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    new = {name: value.clone() for name, value in weights.items()}
    for name in names:
        new[name].view(-1)[::7] += 1
    return new


def buckets() -> list[list[TensorPart]]:
    """The big tensor in three parts, the rest whole, larger elements first."""
    by_name = {spec.name: spec for spec in SPECS}
    cuts = [[("norm", 0, 8), ("embed", 0, 50)], [("big", 0, 120)], [("big", 120, 240)]]
    cuts.append([("big", 240, 300), ("scalar", 0, 1), ("head", 0, 40)])
    result = []
    for cut in cuts:
        parts, end = [], 0
        for name, start, stop in cut:
            spec = by_name[name]
            row_bytes = torch.Size(spec.shape[1:]).numel() * getattr(torch, spec.dtype).itemsize
            nbytes = (stop - start) * row_bytes
            parts.append(TensorPart(spec=spec, start=start, stop=stop, offset=end, nbytes=nbytes))
            end += nbytes
        result.append(parts)
    return result


class CopyEngine:
    """Loads what a transport tells it to load, as an engine does, into a dictionary."""

    def __init__(self, name: str = "engine 0") -> None:
        self.name = name
        self.weights: dict[str, Tensor] = {}

    def load_version(self, folder: str, local_dir: str | None) -> None:
        try:
            if local_dir is None:
                self._load(Path(folder))
            else:
                with LocalCopy(Path(local_dir)).at(Path(folder), 5) as checkpoint:
                    self._load(checkpoint)
        except (ValueError, OSError, TimeoutError) as error:
            raise EngineError(f"{self.name}, load_version: {error}") from error

    def _load(self, folder: Path) -> None:
        SafetensorsFolder(folder).close()
        self.weights = {
            name: value.clone()
            for file in sorted(folder.glob("*.safetensors"))
            for name, value in load_file(file).items()
        }


def send(transport: DiskTransport, engines: list[CopyEngine], version: int, weights: dict[str, Tensor]) -> None:
    transport.begin(version, engines)
    for parts in buckets():
        tensor = torch.empty(4096 * 4, dtype=torch.uint8)
        for part in parts:
            value = weights[part.spec.name]
            rows = value[part.start : part.stop] if value.ndim else value
            tensor[part.offset : part.offset + part.nbytes] = rows.reshape(-1).view(torch.uint8)
        transport.send(parts, SimpleNamespace(tensor=tensor))
        tensor.zero_()
    transport.end(version)


def assert_equal(found: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
    assert found.keys() == weights.keys()
    for name, value in weights.items():
        assert torch.equal(found[name], value), name


def disk_transport(tmp_path, model_dir) -> DiskTransport:
    return DiskTransport(tmp_path / "versions", SPECS, model_dir, ResyncConfig(bucket_bytes=3000, keep=2, timeout_s=10))


def delta_transport(tmp_path, model_dir, encoding=DeltaEncoding.overwrite, full_every=4, keep=2) -> DiskTransport:
    config = ResyncConfig(bucket_bytes=3000, keep=keep, timeout_s=10, full_every=full_every, delta_encoding=encoding)
    return DiskTransport(tmp_path / "versions", SPECS, model_dir, config, tmp_path / "local")


def is_whole(tmp_path, version: int) -> bool:
    return read_manifest(VersionDirectory(tmp_path / "versions").folder(version)).base is None


def version_files(tmp_path, version: int) -> list[Path]:
    """All but the manifest."""
    folder = VersionDirectory(tmp_path / "versions").folder(version)
    return [file for file in folder.iterdir() if file.name != "manifest.json"]
