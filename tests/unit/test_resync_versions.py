"""Versions through folders: written bucket by bucket, applied to a copy, and loaded, without an engine."""

import errno
import json
import os
import resource
import shutil
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from slimrl.config.schema import DeltaEncoding
from slimrl.data.protocols import BucketSpec, EngineError, TensorPart, TensorSpec, num_rows
from slimrl.models.family import family_of
from slimrl.models.safetensors_file import spec_bytes
from slimrl.models.safetensors_folder import SafetensorsFolder
from slimrl.models.toy_configs import TOYS, ToySize
from slimrl.models.versions import codec, local_copy
from slimrl.models.versions.directory import VersionDirectory
from slimrl.models.versions.local_copy import LocalCopy
from slimrl.models.versions.manifest import read_manifest
from slimrl.resync import whole_writer
from slimrl.resync.fan_out import EnginesFailed
from slimrl.resync.sending import Sending
from slimrl.resync.transports.delta import DeltaTransport
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


def buckets() -> list[BucketSpec]:
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
        result.append(BucketSpec(parts=tuple(parts), nbytes=end))
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
    transport.connect(engines)
    transport.begin(version)
    for bucket in buckets():
        tensor = torch.empty(4096 * 4, dtype=torch.uint8)
        for part in bucket.parts:
            value = weights[part.spec.name]
            rows = value[part.start : part.stop] if value.ndim else value
            tensor[part.offset : part.offset + part.nbytes] = rows.reshape(-1).view(torch.uint8)
        transport.send(bucket, SimpleNamespace(tensor=tensor))
        tensor.zero_()
    transport.end(version)


def assert_equal(found: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
    assert found.keys() == weights.keys()
    for name, value in weights.items():
        assert torch.equal(found[name], value), name


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 4 kB, so that the big tensor has several."""
    for module in ("codec", "blocks", "apply"):
        monkeypatch.setattr(f"slimrl.models.versions.{module}.BLOCK_BYTES", 4096)
    monkeypatch.setattr("slimrl.resync.delta_writer.BLOCK_BYTES", 4096)
    assert codec.BLOCK_BYTES == 4096


@pytest.fixture
def model_dir(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"dtype": "bfloat16", "hidden_size": 8}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def disk_transport(tmp_path, model_dir) -> DiskTransport:
    return DiskTransport(tmp_path / "versions", SPECS, model_dir, file_bytes=3000, keep=2, timeout_s=10)


def delta_transport(tmp_path, model_dir, encoding=DeltaEncoding.overwrite, full_every=4, keep=2) -> DeltaTransport:
    return DeltaTransport(
        tmp_path / "versions", SPECS, model_dir, local_dir=tmp_path / "local", full_every=full_every,
        encoding=encoding, file_bytes=3000, keep=keep, timeout_s=10,
    )  # fmt: skip


def is_whole(tmp_path, version: int) -> bool:
    return read_manifest(VersionDirectory(tmp_path / "versions").folder(version)).base is None


def version_files(tmp_path, version: int) -> list[Path]:
    """All but the manifest."""
    folder = VersionDirectory(tmp_path / "versions").folder(version)
    return [file for file in folder.iterdir() if file.name != "manifest.json"]


def test_disk_versions_are_checkpoints_that_the_safetensors_library_reads(tmp_path, model_dir):
    transport = disk_transport(tmp_path, model_dir)
    engines = [CopyEngine("engine 0"), CopyEngine("engine 1")]
    for version in (1, 2, 3):
        weights = random_weights(version)
        send(transport, engines, version, weights)
        for engine in engines:
            assert_equal(engine.weights, weights)
    folder = tmp_path / "versions" / "v000003"
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert (folder / "tokenizer.json").exists()
    assert json.loads((folder / "config.json").read_text()) == {"dtype": "float32", "hidden_size": 8}
    assert sorted(path.name for path in (tmp_path / "versions").iterdir()) == ["v000002", "v000003"]


def test_a_bfloat16_version_says_so_where_biases_of_its_routers_are_float32_and_come_first(tmp_path, model_dir):
    hf_config = TOYS["deepseek_v3"](ToySize(layers=2, hidden=32)) | {"vocab_size": 64}
    specs = family_of(hf_config).weight_map(hf_config).specs("bfloat16")
    specs.sort(key=lambda spec: -getattr(torch, spec.dtype).itemsize)
    assert specs[0].dtype == "float32"
    (model_dir / "config.json").write_text(json.dumps(hf_config))
    transport = DiskTransport(tmp_path / "versions", specs, model_dir, file_bytes=100_000, keep=1, timeout_s=10)
    transport.connect([])
    transport.begin(1)
    for spec in specs:
        nbytes = spec_bytes(spec)
        part = TensorPart(spec=spec, start=0, stop=num_rows(spec), offset=0, nbytes=nbytes)
        buffer = SimpleNamespace(tensor=torch.zeros(nbytes, dtype=torch.uint8))
        transport.send(BucketSpec(parts=(part,), nbytes=nbytes), buffer)
    transport.end(1)
    written = json.loads((tmp_path / "versions" / "v000001" / "config.json").read_text())
    assert written == hf_config | {"dtype": "bfloat16"}


@pytest.mark.parametrize("encoding", list(DeltaEncoding))
def test_deltas_bring_the_copy_from_version_to_version(tmp_path, model_dir, encoding):
    transport = delta_transport(tmp_path, model_dir, encoding)
    engine, weights = CopyEngine(), random_weights(0)
    changes = [[], ["embed", "big"], ["norm"], ["head", "scalar"], ["big"], [], ["embed"]]
    for version, names in enumerate(changes, 1):
        weights = with_changes(weights, *names)
        send(transport, [engine], version, weights)
        assert_equal(engine.weights, weights)
        assert is_whole(tmp_path, version) == (version in (1, 5))
        stored = read_manifest(tmp_path / "versions" / f"v{version:06d}").tensors
        assert transport.written is not None
        assert transport.written.nbytes == sum(file.stat().st_size for file in version_files(tmp_path, version))
        if version in (1, 5):
            assert transport.written.changed_fraction is None
        else:
            assert {name for name, tensor in stored.items() if tensor.blocks} == set(names)
            changed = sum(len(range(0, weights[name].numel(), 7)) for name in names)
            assert transport.written.changed_fraction == changed / sum(value.numel() for value in weights.values())
    assert [int(p.name[1:]) for p in sorted((tmp_path / "versions").iterdir())] == [5, 6, 7]
    transport.close()


def test_nothing_is_left_of_a_mirror(tmp_path, model_dir):
    transport = delta_transport(tmp_path, model_dir)
    send(transport, [CopyEngine()], 1, random_weights(0))
    assert [path.name for path in (tmp_path / "local").iterdir()] == ["engine_0"]
    transport.close()


def test_an_engine_that_missed_a_version_and_a_new_one_follow_the_chain(tmp_path, model_dir):
    transport = delta_transport(tmp_path, model_dir)
    weights = random_weights(0)
    engines = [CopyEngine("engine 0"), CopyEngine("engine 1")]
    send(transport, engines, 1, weights)
    weights = with_changes(weights, "big")
    send(transport, [engines[0]], 2, weights)
    weights = with_changes(weights, "embed")
    newcomer = CopyEngine("engine 2")
    send(transport, [*engines, newcomer], 3, weights)
    for engine in (*engines, newcomer):
        assert_equal(engine.weights, weights)
    assert not is_whole(tmp_path, 3)


def test_a_node_without_a_copy_starts_from_the_whole_version(tmp_path, model_dir):
    transport = delta_transport(tmp_path, model_dir)
    weights = random_weights(0)
    for version in (1, 2, 3):
        weights = with_changes(weights, "big", "embed")
        send(transport, [], version, weights)
    engine = CopyEngine()
    engine.load_version(str(tmp_path / "versions" / "v000003"), str(tmp_path / "elsewhere"))
    assert_equal(engine.weights, weights)


def test_a_version_sent_twice_is_whole_the_second_time(tmp_path, model_dir):
    transport = delta_transport(tmp_path, model_dir)
    engine, weights = CopyEngine(), random_weights(0)
    send(transport, [engine], 1, weights)
    send(transport, [engine], 2, with_changes(weights, "big"))
    weights = with_changes(weights, "embed")
    send(transport, [engine], 2, weights)
    assert is_whole(tmp_path, 2)
    assert_equal(engine.weights, weights)


def test_a_version_that_breaks_off_is_followed_by_a_whole_one(tmp_path, model_dir):
    transport = delta_transport(tmp_path, model_dir)
    engine, weights = CopyEngine(), random_weights(0)
    send(transport, [engine], 1, weights)
    transport.begin(2)
    transport.send(buckets()[0], SimpleNamespace(tensor=torch.zeros(4096, dtype=torch.uint8)))
    send(transport, [engine], 2, weights)
    assert is_whole(tmp_path, 2)
    assert_equal(engine.weights, weights)


class Broken(CopyEngine):
    """Damages a version's folder before it loads it, once."""

    def __init__(self, damage) -> None:
        super().__init__()
        self.damage = damage

    def load_version(self, folder: str, local_dir: str | None) -> None:
        if self.damage is not None:
            self.damage(Path(folder))
            self.damage = None
        super().load_version(folder, local_dir)


def cut_short(folder: Path) -> None:
    file = next(folder.glob("*.zst"))
    os.truncate(file, file.stat().st_size - 1)


def flip_a_bit(folder: Path) -> None:
    file = next(folder.glob("*.zst"))
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)


def claim_another_base(folder: Path) -> None:
    value = json.loads((folder / "manifest.json").read_text())
    value["base"]["id"] = "0123456789abcdef"
    (folder / "manifest.json").write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (cut_short, r"version 2 .*v000002/changed-00001.zst is cut short"),
        (flip_a_bit, r"version 2 .*model-0000.*safetensors: (norm|embed): .*changed-00001.zst: a damaged frame"),
        (claim_another_base, r"version 2 .* is a delta on version 1 \(0123456789abcdef\), but .*v000001 is version 1"),
    ],
)
def test_a_broken_delta_is_refused_by_name_and_the_next_version_works(tmp_path, model_dir, damage, cause):
    transport = delta_transport(tmp_path, model_dir)
    engine, weights = Broken(None), random_weights(0)
    send(transport, [engine], 1, weights)
    engine.damage = damage
    with pytest.raises(EnginesFailed, match=cause):
        send(transport, [engine], 2, with_changes(weights, "embed", "norm"))
    assert_equal(engine.weights, weights)
    weights = with_changes(weights, "big")
    send(transport, [engine], 2, weights)
    assert is_whole(tmp_path, 2)
    assert_equal(engine.weights, weights)
    weights = with_changes(weights, "norm")
    send(transport, [engine], 3, weights)
    assert not is_whole(tmp_path, 3)
    assert_equal(engine.weights, weights)


@pytest.mark.parametrize("encoding", list(DeltaEncoding))
def test_a_delta_on_a_copy_of_other_bytes_is_found_by_the_checksum_and_loaded_by_nobody(tmp_path, model_dir, encoding):
    transport = delta_transport(tmp_path, model_dir, encoding)
    engine, weights = CopyEngine(), random_weights(0)
    send(transport, [engine], 1, weights)
    with SafetensorsFolder(tmp_path / "local" / "engine_0" / "checkpoint") as folder:
        file = tmp_path / "local" / "engine_0" / "checkpoint" / folder.file_of("big")
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    new = with_changes(weights, "big")
    with pytest.raises(EnginesFailed, match=r"version 2 .*: big has the checksum .* is due"):
        send(transport, [engine], 2, new)
    assert_equal(engine.weights, weights)
    assert LocalCopy(tmp_path / "local" / "engine_0").version() is None
    engine.load_version(str(tmp_path / "versions" / "v000002"), str(tmp_path / "local" / "engine_0"))
    assert_equal(engine.weights, new)


def test_a_copy_of_another_life_of_the_machine_is_not_relied_on(tmp_path, model_dir, monkeypatch):
    transport = delta_transport(tmp_path, model_dir)
    send(transport, [CopyEngine()], 1, random_weights(0))
    assert LocalCopy(tmp_path / "local" / "engine_0").version() is not None
    (tmp_path / "boot").write_text("another")
    monkeypatch.setattr(local_copy, "_BOOT_ID", tmp_path / "boot")
    assert LocalCopy(tmp_path / "local" / "engine_0").version() is None


def test_a_copy_that_others_load_from_does_not_change(tmp_path, model_dir):
    transport = delta_transport(tmp_path, model_dir)
    weights = random_weights(0)
    send(transport, [], 1, weights)
    send(transport, [], 2, with_changes(weights, "big"))
    first, second = (tmp_path / "versions" / name for name in ("v000001", "v000002"))
    here = tmp_path / "copy"
    with LocalCopy(here).at(first, 5) as checkpoint:
        with LocalCopy(here).at(first, 5) as same:
            assert same == checkpoint
        with pytest.raises(TimeoutError, match="others load version 1"), LocalCopy(here).at(second, 0.1):
            pass
    with LocalCopy(here).at(second, 5):
        assert LocalCopy(here).version().version == 2


def test_a_folder_that_cannot_be_removed_yet_does_not_fail_the_version_and_goes_with_a_later_one(
    tmp_path, model_dir, monkeypatch, caplog
):
    """As on NFS, where a file that a reader holds open comes back as `.nfs...` in its folder."""
    transport, engine = disk_transport(tmp_path, model_dir), CopyEngine()
    with monkeypatch.context() as held:
        held.setattr(shutil, "rmtree", refuse)
        for version in range(1, 5):
            send(transport, [engine], version, random_weights(version))
    assert "could not be removed; the next version tries again: [Errno 39] held open" in caplog.text
    assert VersionDirectory(tmp_path / "versions").versions() == [3, 4]
    assert len(list((tmp_path / "versions").glob(".*.removed"))) == 2
    send(transport, [engine], 5, random_weights(5))
    assert list((tmp_path / "versions").glob(".*")) == []
    assert_equal(engine.weights, random_weights(5))


def refuse(path: Path) -> None:
    raise OSError(errno.ENOTEMPTY, "held open")


@pytest.mark.parametrize("kind", ["disk", "delta"])
def test_a_bucket_that_a_stalled_disk_takes_late_meets_no_other_file(tmp_path, model_dir, monkeypatch, kind):
    """The send is given up after its deadline; until its thread has ended, no version begins and nothing is closed."""
    transport = disk_transport(tmp_path, model_dir) if kind == "disk" else delta_transport(tmp_path, model_dir)
    engine = CopyEngine()
    stalled, goes_on = threading.Event(), threading.Event()

    def stall(*arguments) -> None:
        stalled.set()
        assert goes_on.wait(20)
        write_at(*arguments)

    write_at = whole_writer.write_at
    monkeypatch.setattr(whole_writer, "write_at", stall)
    late = Sending(lambda: send(transport, [engine], 1, random_weights(1)))
    assert stalled.wait(20)
    assert "was not sent within" in str(late.wait(0.05))
    with pytest.raises(OSError, match="a bucket sent earlier is still being written"):
        transport.begin(2)
    transport.close()
    goes_on.set()
    assert late.wait(20) is None
    assert_equal(engine.weights, random_weights(1))
    send(transport, [engine], 2, random_weights(2))
    assert_equal(engine.weights, random_weights(2))
    transport.close()


@contextmanager
def no_file_above(nbytes: int):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("kind", ["disk", "delta"])
def test_a_sender_s_full_disk_is_named_and_gets_its_room_back(tmp_path, model_dir, kind):
    engine, weights = CopyEngine(), random_weights(0)
    if kind == "disk":
        transport, folder = disk_transport(tmp_path, model_dir), tmp_path / "versions"
    else:
        transport, folder = delta_transport(tmp_path, model_dir), tmp_path / "local"
    with no_file_above(2000), pytest.raises(OSError, match="File too large") as caught:
        send(transport, [engine], 1, weights)
    assert caught.value.filename == str(folder)
    assert list(folder.iterdir()) == list((tmp_path / "versions").iterdir()) == []
    send(transport, [engine], 1, weights)
    assert_equal(engine.weights, weights)


def test_an_engine_s_full_disk_is_named_and_the_next_version_works(tmp_path, model_dir):
    transport = delta_transport(tmp_path, model_dir)
    engine, weights = CopyEngine(), random_weights(0)
    send(transport, [], 1, weights)
    cause = r"version 1 .*local/engine_0/checkpoint/model-.*\.safetensors: File too large"
    with no_file_above(2000), pytest.raises(EngineError, match=cause):
        engine.load_version(str(tmp_path / "versions" / "v000001"), str(tmp_path / "local" / "engine_0"))
    assert engine.weights == {}
    weights = with_changes(weights, "big")
    send(transport, [engine], 2, weights)
    assert_equal(engine.weights, weights)
