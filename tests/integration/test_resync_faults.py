"""Engines and trainer ranks that stop, die or come too late: each resync ends in time, says why, and mixes nothing."""

import logging
import logging.handlers
import os
import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch.distributed as dist
from engine_probes import KEY, answers, serves
from fault_cases import (
    BUCKET_BYTES,
    CALL_TIMEOUT_S,
    LOADS,
    ROLLOUT,
    EngineAt,
    Fault,
    Trainer,
    assert_one_version,
    outlive,
)
from fleet import Fleet
from ranks import run_ranks
from slimrl_tools.toy.toy import ToySize, write_toy

from slimrl.checkpoints.versions.directory import VersionDirectory
from slimrl.checkpoints.versions.manifest import read_manifest
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.resync import DeltaEncoding, ResyncConfig, TransportName, VerifyMode
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.engines.servers.process import ServerError
from slimrl.engines.servers.server import EngineServer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

SIZE = ToySize(init_std=0.1)
BOUND_S = 10 * CALL_TIMEOUT_S
"""A resync that goes wrong: a call out of time, signs of life of all engines, and the version once more."""


def config(transport: TransportName = TransportName.ipc) -> ResyncConfig:
    return ResyncConfig(
        transport=transport, bucket_bytes=BUCKET_BYTES, verify=VerifyMode.full, timeout_s=CALL_TIMEOUT_S
    )


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    paths = [folder / name for name in "ab"]
    for seed, path in enumerate(paths):
        write_toy("qwen3_moe", path, SIZE, seed)
    return paths


@pytest.fixture(scope="module")
def fleet(checkpoints, tmp_path_factory):
    rollout = RolloutConfig(**{**vars(ROLLOUT), "num_engines": 2})
    with Fleet(rollout, checkpoints[0], tmp_path_factory.mktemp("logs"), precision=Precision.fp32) as fleet:
        yield fleet


@pytest.fixture
def engines(fleet, checkpoints, tmp_path) -> list[EngineAt]:
    """Two engines that live, at the same addresses in every test."""
    for index, server in enumerate(fleet.engines):
        try:
            server.check()
        except ServerError:
            server.stop()
            fleet.engines[index] = EngineServer(
                index,
                ROLLOUT,
                checkpoints[0],
                tmp_path / "engine.log",
                precision=Precision.fp32,
                port=server.port,
                key=KEY,
            )
            fleet.engines[index].wait_ready()
    return [EngineAt(f"engine {server.index}", server.url, server.process.pid) for server in fleet.engines]


def assert_left_out(outcomes: list[tuple[dict[str, str], float]], faults: list[Fault]) -> None:
    assert len(outcomes) == len(faults)
    for fault, (failed, seconds) in zip(faults, outcomes, strict=True):
        assert list(failed) == ["engine 1"], fault
        assert failed["engine 1"].startswith("engine 1"), failed
        assert seconds < BOUND_S, (fault, seconds)


@pytest.mark.full
def test_an_engine_that_stops_or_dies_while_it_loads_is_left_out_and_comes_back(engines, checkpoints, tmp_path):
    faults = [Fault("stop", LOADS, 2), Fault("kill", LOADS, 2, "during")]
    outcomes, _ = run_ranks(outlive, 2, engines, checkpoints, config(), faults, tmp_path / "engine", timeout_s=200)
    assert_left_out(outcomes, faults)


@pytest.mark.full
@pytest.mark.parametrize("transport", [TransportName.ipc, TransportName.p2p])
def test_whenever_an_engine_stops_or_dies_the_other_gets_the_whole_version(engines, checkpoints, tmp_path, transport):
    # With p2p one request is for all of a version.
    number = 2 if transport is TransportName.ipc else 1
    faults = [
        Fault("kill", ("pause_generation",)),
        Fault("kill", ("begin_weight_update",)),
        Fault("stop", LOADS, number),
        Fault("kill", LOADS, number, "during"),
        Fault("kill", LOADS, number, "after"),
        Fault("stop", ("end_weight_update",)),
        Fault("kill", ("update_weight_version",), 1, "after"),
        Fault("stop", ("continue_generation",)),
    ]
    log = tmp_path / "engine"
    outcomes, _ = run_ranks(outlive, 2, engines, checkpoints, config(transport), faults, log, timeout_s=390)
    assert_left_out(outcomes, faults)


class DyingSource:
    """A weight source whose rank is killed in place of giving its `left`th weight from now on; 0 spares it."""

    def __init__(self, source) -> None:
        self._source, self.left = source, 0

    def __getattr__(self, name):
        return getattr(self._source, name)

    def groups(self, name):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return self._source.groups(name)


def lose_a_rank(rank, num_ranks, port, engines, checkpoints, settings):
    """Rank 1 dies in the middle of version 2; what rank 0 says, and how long it took to."""
    trainer = Trainer(rank, num_ranks, port, engines, checkpoints, settings, source=DyingSource)
    _, error, _ = trainer.send(1)
    assert error == ""
    trainer.source.left = 4 if rank == 1 else 0
    _, error, seconds = trainer.send(2)
    return error, seconds


def send_once(rank, num_ranks, port, engines, checkpoints, settings, version):
    """A version that finds no memory, the same where there is some, and the same once more; the last one's error."""
    trainer = Trainer(rank, num_ranks, port, engines, checkpoints, settings)
    # Only what is sent through files of /dev/shm needs them.
    if settings.transport is TransportName.ipc:
        with full_disk() if rank == 0 else nullcontext():
            report, error, seconds = trainer.send(version)
        assert error.startswith(f"ResyncError: resync of version {version} failed: rank 0: buffers of "), error
        assert seconds < CALL_TIMEOUT_S
    report, error, _ = trainer.send(version)
    assert error == ""
    if rank == 0:
        assert report.failed_engines == {}
        for control in trainer.controls:
            assert_one_version(trainer, version, control)
    again = trainer.send(version)[1]
    trainer.close()
    return again


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process can grow beyond 10 kB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def damage_deltas(rank, num_ranks, port, engines, checkpoints, settings):
    """What is warned of, where it is, and the error on a full disk; all on rank 0."""
    warnings = logging.handlers.MemoryHandler(1000)
    logging.getLogger("slimrl.resync").addHandler(warnings)
    trainer = Trainer(rank, num_ranks, port, engines, checkpoints, settings)
    root, copies = (Path(folder) / "faults" for folder in (settings.dir, settings.local_dir))

    def send(version, error=""):
        assert trainer.send(version)[1].startswith(error)
        said = [record.getMessage() for record in warnings.buffer]
        warnings.buffer.clear()
        if rank == 0 and not error:
            for control in trainer.controls:
                assert_one_version(trainer, version, control)
        return said

    def is_delta(version):
        return read_manifest(VersionDirectory(root).folder(version)).base is not None

    assert send(1) == []
    whole = VersionDirectory(root).folder(1)
    if rank == 0:
        shutil.copytree(whole, copies / "first")
    assert send(2) == []
    kinds, messages = [is_delta(1), is_delta(2)], []
    # The copy of engine 1 claims to be version 2 and is version 1.
    if rank == 0:
        for file in (copies / "first").glob("*.safetensors"):
            shutil.copy(file, copies / "engine_1" / "checkpoint" / file.name)
    messages += send(3)
    kinds.append(is_delta(3))
    messages += send(4)
    kinds.append(is_delta(4))
    for control in trainer.controls:  # Before any of them reads it.
        control.arm(Fault("truncate", LOADS))
    messages += send(5)
    kinds.append(is_delta(5))
    with full_disk() if rank == 0 else nullcontext():
        send(6, "ResyncError: resync of version 6 failed at bucket")
    if rank == 0:
        assert not any(answers(engine.url) for engine in engines)
    dist.barrier()
    assert send(7) == []
    kinds.append(is_delta(7))
    trainer.close()
    return messages, kinds


@pytest.mark.full
def test_a_wrong_base_a_truncated_delta_and_a_full_disk_are_named_and_followed_by_a_whole_version(
    engines, checkpoints, tmp_path
):
    settings = ResyncConfig(
        transport=TransportName.delta, bucket_bytes=BUCKET_BYTES, verify=VerifyMode.full, timeout_s=2 * CALL_TIMEOUT_S,
        dir=str(tmp_path / "versions"), local_dir=str(tmp_path / "local"), delta_encoding=DeltaEncoding.xor,
    )  # fmt: skip
    (messages, kinds), _ = run_ranks(damage_deltas, 2, engines, checkpoints, settings, timeout_s=200)
    assert kinds == [False, True, False, True, False, False]
    wrong_base, truncated = messages
    assert "version 3" in wrong_base
    assert "model." in wrong_base
    assert "version 5" in truncated
    assert "cut short" in truncated


@pytest.mark.full
@pytest.mark.parametrize("transport", [TransportName.ipc, TransportName.p2p])
def test_a_dead_rank_and_full_shared_memory_are_named_and_the_engines_take_the_next_version(
    engines, checkpoints, transport
):
    settings = config(transport)
    (error, seconds), _ = run_ranks(lose_a_rank, 2, engines, checkpoints, settings, dying=[1], timeout_s=200)
    assert error.startswith("ResyncError: resync of version 2"), error
    assert ("at round" if transport is TransportName.ipc else "while it was sent") in error
    assert seconds < BOUND_S
    # Paused, since what they have may be of two versions.
    assert not any(answers(engine.url) for engine in engines)
    errors = run_ranks(send_once, 2, engines, checkpoints, settings, 3, timeout_s=200)
    assert all(serves(engine.url, checkpoints[1]) for engine in engines)
    assert all(error.startswith("ValueError: ") and "version 3" in error for error in errors), errors
