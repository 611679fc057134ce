"""Versions through folders: written bucket by bucket, applied to a copy, and loaded, without an engine."""

import errno
import json
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from version_cases import (
    CopyEngine,
    assert_equal,
    buckets,
    delta_transport,
    disk_transport,
    is_whole,
    random_weights,
    send,
    version_files,
    with_changes,
)

from slimrl.checkpoints.safetensors_file import spec_bytes
from slimrl.checkpoints.safetensors_folder import INDEX_NAME
from slimrl.checkpoints.versions import local_copy
from slimrl.checkpoints.versions.directory import VersionDirectory
from slimrl.checkpoints.versions.local_copy import LocalCopy
from slimrl.checkpoints.versions.manifest import read_manifest
from slimrl.config.schema.resync import DeltaEncoding, ResyncConfig
from slimrl.data.model_weights import TensorPart, TensorSpec, num_rows, packed_bytes
from slimrl.models.family import family_of
from slimrl.models.hf_config import BLOCK_FP8
from slimrl.quantization.fp8 import FP8_DTYPE
from slimrl.resync import version_writer
from slimrl.resync.engine_calls import EnginesFailed, SendThread
from slimrl.resync.transports.disk import DiskTransport
from slimrl.toys.toy_configs import TOYS, ToySize

pytestmark = pytest.mark.usefixtures("small_blocks")


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
    transport = DiskTransport(
        tmp_path / "versions", specs, model_dir, ResyncConfig(bucket_bytes=100_000, keep=1, timeout_s=10)
    )
    transport.begin(1, [])
    for spec in specs:
        nbytes = spec_bytes(spec)
        part = TensorPart(spec=spec, start=0, stop=num_rows(spec), offset=0, nbytes=nbytes)
        buffer = SimpleNamespace(tensor=torch.zeros(nbytes, dtype=torch.uint8))
        transport.send([part], buffer)
    transport.end(1)
    written = json.loads((tmp_path / "versions" / "v000001" / "config.json").read_text())
    assert written == hf_config | {"dtype": "bfloat16"}


def test_a_version_in_block_fp8_keeps_the_config_of_the_engine_s_checkpoint(tmp_path, model_dir):
    hf_config = {"dtype": "bfloat16", "hidden_size": 8, "quantization_config": BLOCK_FP8}
    (model_dir / "config.json").write_text(json.dumps(hf_config))
    specs = [
        TensorSpec(name="a.weight", shape=(8, 8), dtype=FP8_DTYPE),
        TensorSpec(name="a.weight_scale_inv", shape=(1, 1), dtype="float32"),
    ]
    transport = DiskTransport(
        tmp_path / "versions", specs, model_dir, ResyncConfig(bucket_bytes=1000, keep=1, timeout_s=10)
    )
    transport.begin(1, [])
    for spec in specs:
        part = TensorPart(spec=spec, start=0, stop=num_rows(spec), offset=0, nbytes=spec_bytes(spec))
        buffer = SimpleNamespace(tensor=torch.zeros(part.nbytes, dtype=torch.uint8))
        transport.send([part], buffer)
    transport.end(1)
    assert json.loads((tmp_path / "versions" / "v000001" / "config.json").read_text()) == hf_config


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
        assert transport.written_bytes == sum(file.stat().st_size for file in version_files(tmp_path, version))
        if version in (1, 5):
            assert transport.changed_fraction is None
        else:
            assert {name for name, tensor in stored.items() if tensor.frames} == set(names)
            changed = sum(len(range(0, weights[name].numel(), 7)) for name in names)
            assert transport.changed_fraction == changed / sum(value.numel() for value in weights.values())
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
    transport.begin(2, [])
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
    folder = tmp_path / "local" / "engine_0" / "checkpoint"
    file = folder / json.loads((folder / INDEX_NAME).read_text())["weight_map"]["big"]
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    new = with_changes(weights, "big")
    with pytest.raises(EnginesFailed, match=r"version 2 .*: big has the checksum .*, expected "):
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
        with pytest.raises(TimeoutError, match="other processes load version 1"), LocalCopy(here).at(second, 0.1):
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
    stalled, should_continue = threading.Event(), threading.Event()

    def stall(*arguments) -> None:
        stalled.set()
        assert should_continue.wait(20)
        write_at(*arguments)

    write_at = version_writer.write_at
    monkeypatch.setattr(version_writer, "write_at", stall)
    late = SendThread(lambda: send(transport, [engine], 1, random_weights(1)))
    assert stalled.wait(20)
    assert "was not sent within" in str(late.wait(0.05))
    with pytest.raises(OSError, match="a bucket of an earlier attempt is still being written"):
        transport.begin(2, [])
    transport.close()
    should_continue.set()
    assert late.wait(20) is None
    assert_equal(engine.weights, random_weights(1))
    send(transport, [engine], 2, random_weights(2))
    assert_equal(engine.weights, random_weights(2))
    transport.close()


@pytest.mark.parametrize("kind", [disk_transport, delta_transport])
def test_a_version_that_is_closed_in_the_middle_leaves_no_folder_and_no_open_file(tmp_path, model_dir, kind):
    transport = kind(tmp_path, model_dir)
    before = set(os.listdir("/proc/self/fd"))
    transport.begin(1, [CopyEngine()])
    parts = buckets()[0]
    transport.send(parts, SimpleNamespace(tensor=torch.zeros(packed_bytes(parts), dtype=torch.uint8)))
    assert (tmp_path / "versions" / ".v000001.partial").is_dir()
    transport.close()
    transport.close()
    assert list((tmp_path / "versions").iterdir()) == []
    assert set(os.listdir("/proc/self/fd")) <= before
