"""Resyncs of a tiny model from two trainer ranks to real engines, in which something breaks where a test wants it."""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from engine_probes import KEY, answers, serves
from weight_sender import WeightSender

from slimrl.config.schema.precision import Precision
from slimrl.config.schema.resync import ResyncConfig
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.config.schema.trainer import ParallelConfig
from slimrl.data.model_weights import EngineControl
from slimrl.engines.servers.control import SglangControl
from slimrl.engines.servers.server import EngineServer
from slimrl.observability.memory import session_members
from slimrl.resync.session import ResyncError, ResyncReport, ResyncSession
from slimrl.trainer.weight_source import MegatronWeightSource

CALL_TIMEOUT_S = 6.0
"""Deadline of one call to an engine, and of the ranks' agreement on a bucket."""
GROUP_TIMEOUT_S = 120.0
BUCKET_BYTES = 1_000_000
ROLLOUT = RolloutConfig(max_trajectory_tokens=128, startup_timeout_s=150, sglang={"max_total_tokens": 4096})

LOADS = ("update_weights_from_tensor", "update_weights_from_distributed", "update_weights_from_disk")
"""Routes by which weights reach an engine."""


@dataclass(frozen=True)
class EngineAt:
    """A running engine."""

    name: str
    url: str
    pid: int
    """Process id of its main process"""


@dataclass(frozen=True)
class Fault:
    """What happens to engine 1: `action` at the `number`th call of one of `routes`, before, during or after it."""

    action: str
    """kill or stop, as the signals; or truncate, of a file of the version that the engine is told to load"""
    routes: tuple[str, ...]
    number: int = 1
    moment: str = "before"


@dataclass(eq=False)
class FaultyControl(SglangControl):
    """The control of an engine to which faults happen."""

    engine: EngineAt
    fault: Fault | None = None
    calls: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(self.engine.name, self.engine.url, timeout_s=CALL_TIMEOUT_S, key=KEY)

    def arm(self, fault: Fault | None) -> None:
        self.fault, self.calls = fault, {}

    def _call(self, route: str, **body: Any) -> dict[str, Any]:
        self.calls[route] = self.calls.get(route, 0) + 1
        fault = self.fault
        if fault is None or route not in fault.routes or self.calls[route] != fault.number:
            return super()._call(route, **body)
        if fault.action == "truncate":
            largest = max(Path(body["model_path"]).iterdir(), key=lambda path: path.stat().st_size)
            os.truncate(largest, largest.stat().st_size // 2)
        elif fault.moment == "before":
            self._act(fault.action)
        elif fault.moment == "during":
            # Stopped, it cannot answer first.
            self._signal(signal.SIGSTOP)
            threading.Timer(0.3, self._act, [fault.action]).start()
        answer = super()._call(route, **body)
        if fault.moment == "after":
            self._act(fault.action)
        return answer

    def _act(self, action: str) -> None:
        self._signal(signal.SIGKILL if action == "kill" else signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for pid in session_members(self.engine.pid):
            os.kill(pid, number)


class Trainer:
    """One of two ranks that share the experts between them, and a session with its engines."""

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        port: int,
        engines: Sequence[EngineAt],
        checkpoints: Sequence[Path],
        config: ResyncConfig,
        source: Callable[[MegatronWeightSource], Any] = lambda source: source,
    ) -> None:
        """
        Args:
            checkpoints: versions take turns with their weights.
            source: puts something in the place of the weight source.
        """
        self.rank, self.checkpoints = rank, checkpoints
        self.sender = WeightSender(
            rank, num_ranks, port, checkpoints[0], ParallelConfig(expert=num_ranks), timeout_s=GROUP_TIMEOUT_S
        )
        self.controls = [FaultyControl(engine) for engine in engines]
        self.source = source(self.sender.source)
        self.session = ResyncSession(
            self.source, self.controls, config, rank=rank, run_id="faults", model_dir=checkpoints[0]
        )

    def checkpoint(self, version: int) -> Path:
        return self.checkpoints[version % len(self.checkpoints)]

    def load(self, version: int) -> None:
        self.sender.load(self.checkpoint(version))

    def send(self, version: int) -> tuple[ResyncReport | None, str, float]:
        """(report, error, seconds) of one version; one of the first two is there on rank 0."""
        self.load(version)
        dist.barrier()
        start = time.monotonic()
        try:
            return self.session.run(version), "", time.monotonic() - start
        except (ResyncError, ValueError) as error:
            return None, f"{type(error).__name__}: {error}", time.monotonic() - start

    def use(self, engines: Sequence[EngineControl]) -> None:
        """Rank 0 may have taken a while to start one of them."""
        dist.barrier()
        self.session.use(engines)

    def close(self) -> None:
        self.session.close()
        self.sender.close()


def replace(control: FaultyControl, model: Path, log: Path) -> tuple[FaultyControl, EngineServer]:
    """End what is left of the engine and start another at its address, paused."""
    control._signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while session_members(control.engine.pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    port = int(control.engine.url.rsplit(":", 1)[1])
    server = EngineServer(1, ROLLOUT, model, log, precision=Precision.fp32, port=port, key=KEY)
    server.wait_ready()
    fresh = FaultyControl(EngineAt(control.name, server.url, server.process.pid))
    fresh.pause()
    return fresh, server


def assert_one_version(trainer: Trainer, version: int, control: FaultyControl) -> None:
    """The engine says that it serves the version, and computes with nothing else."""
    assert control.version() == version
    assert serves(control.engine.url, trainer.checkpoint(version))


def outlive(
    rank: int,
    num_ranks: int,
    port: int,
    engines: list[EngineAt],
    checkpoints: list[Path],
    config: ResyncConfig,
    faults: list[Fault],
    log: Path,
) -> list[tuple[dict[str, str], float]]:
    """After each fault engine 0 goes on alone, and engine 1 comes back at the version after.

    Returns:
        For each fault, on rank 0: the failed engines with their reasons, and the seconds that the resync took.
    """
    trainer = Trainer(rank, num_ranks, port, engines, checkpoints, config)
    servers: list[EngineServer] = []
    outcomes = []
    version = 0
    try:
        for number, fault in enumerate(faults):
            version += 1
            _, faulty = trainer.controls
            faulty.arm(fault)
            report, error, seconds = trainer.send(version)
            assert error == ""
            if rank == 0:
                assert report is not None
                outcomes.append((dict(report.failed_engines), seconds))
                assert_one_version(trainer, version, trainer.controls[0])
                faulty.arm(None)
                if fault.action == "stop":
                    faulty._signal(signal.SIGCONT)
                    faulty.probe(20.0)
                # Gone, or paused with weights of two versions, or all of it has come through late.
                if answers(faulty.engine.url):
                    assert fault.routes != LOADS
                    assert_one_version(trainer, version, faulty)
                if fault.action == "kill":
                    fresh, server = replace(faulty, checkpoints[0], log.with_suffix(f".{number}"))
                    trainer.controls = [trainer.controls[0], fresh]
                    servers.append(server)
            trainer.use(trainer.controls)
            version += 1
            report, error, _ = trainer.send(version)
            assert error == ""
            if rank == 0:
                assert report is not None
                assert dict(report.failed_engines) == {}
                assert report.mismatching == ()
                for control in trainer.controls:
                    assert_one_version(trainer, version, control)
        trainer.close()
    finally:
        for server in servers:
            server.stop()
    return outcomes
