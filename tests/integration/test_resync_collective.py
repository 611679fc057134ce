"""Broadcasts of what two trainer ranks hold to two engines, one of them with two ranks that hold different experts."""

import itertools
import os
import signal
import threading
import time

import pytest
from engine_probes import KEY
from ranks import run_ranks
from slimrl_tools.toy.toy import ToySize, write_toy
from weight_sender import WeightSender

from slimrl.config.schema.precision import Precision
from slimrl.config.schema.resync import ResyncConfig, TransportName, VerifyMode
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.config.schema.trainer import ParallelConfig
from slimrl.data.engine import EngineError
from slimrl.engines.servers.control import SglangControl
from slimrl.engines.servers.server import EngineServer
from slimrl.resync.session import ResyncSession
from slimrl.resync.transports.collective import CollectiveTransport

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

TIMEOUT_S = 20.0
BUCKET_BYTES = 300_000


class KillingTransport(CollectiveTransport):
    """Kills a process while a bucket of the version is broadcast."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.pid_to_kill = None
        self.group_names = []

    def begin(self, version, engines):
        super().begin(version, engines)
        self.group_names.append(self.group.name)

    def send(self, parts, buffer):
        if self._num_sent == 2 and self.pid_to_kill is not None:
            threading.Thread(target=os.kill, args=(self.pid_to_kill, signal.SIGKILL)).start()
            self.pid_to_kill = None
        super().send(parts, buffer)


def broadcast_versions(rank, world_size, port, paths, engines):
    """Two versions to both engines, then one in which engine 0 is killed.

    Returns:
        Reports, names of groups, seconds of the third version and the version that engine 1 serves, on rank 0.
    """
    sender = WeightSender(rank, world_size, port, paths[0], ParallelConfig(expert=2), timeout_s=90.0)
    controls = [
        SglangControl(f"engine {index}", url, timeout_s=TIMEOUT_S, num_ranks=num_ranks, key=KEY)
        for index, (url, num_ranks, _) in enumerate(engines)
    ]
    config = ResyncConfig(
        transport=TransportName.collective, bucket_bytes=BUCKET_BYTES, verify=VerifyMode.full, timeout_s=TIMEOUT_S
    )
    transport = KillingTransport("127.0.0.1", "slimrl-test", TIMEOUT_S, bucket_bytes=BUCKET_BYTES)
    session = ResyncSession(sender.source, controls, config, rank=rank, run_id="test-collective", transport=transport)
    reports, seconds = [], 0.0
    for version, path in enumerate(paths, 1):
        sender.load(path)
        if version == 3:
            transport.pid_to_kill = engines[0][2]
        start = time.monotonic()
        reports.append(session.run(version))
        seconds = time.monotonic() - start
    session.use(controls[1:])
    one_fault_after_another(session, controls[1], rank)
    version = controls[1].version() if rank == 0 else None
    session.close()
    sender.close()
    return (reports, transport.group_names[:4], seconds, version) if rank == 0 else None


def one_fault_after_another(session, engine, rank):
    """Plants two faults in a living engine, each in the middle of a version that the next attempt completes."""

    def refused(call, number):
        """The call of this number, from 0."""
        numbers = itertools.count()

        def answer(*arguments):
            if next(numbers) == number:
                raise EngineError("planted")
            call(*arguments)

        return answer

    for version, name, number in ((4, "load_received", 2), (5, "pause", 0)):
        call = getattr(engine, name)
        setattr(engine, name, refused(call, number))
        start = time.monotonic()
        report = session.run(version)
        assert rank or (report.mismatching, report.failed_engines) == ((), {})
        assert time.monotonic() - start < TIMEOUT_S / 2
        setattr(engine, name, call)


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_engines_of_one_and_two_ranks_get_every_version_and_a_killed_one_does_not_hold_up_the_other(tmp_path, family):
    paths = [tmp_path / name for name in "abc"]
    for seed, path in enumerate(paths):
        write_toy(family, path, ToySize(), seed)
    servers = []
    for index, num_ranks in enumerate((1, 2)):
        rollout = RolloutConfig(
            engine_tp=num_ranks,
            engine_ep=num_ranks,
            max_trajectory_tokens=128,
            sglang={"max_total_tokens": 4096},
        )
        log = tmp_path / f"engine_{index}.log"
        servers.append(EngineServer(index, rollout, paths[0], log, precision=Precision.fp32, key=KEY))
    try:
        for server in servers:
            server.wait_ready()
        engines = [
            (server.url, num_ranks, server.process.pid) for server, num_ranks in zip(servers, (1, 2), strict=True)
        ]
        (reports, groups, seconds, version), _ = run_ranks(broadcast_versions, 2, paths, engines, timeout_s=200)
    finally:
        for server in servers:
            server.stop()
    assert [report.mismatching for report in reports] == [(), (), ()]
    assert [list(report.failed_engines) for report in reports] == [[], [], ["engine 0"]]
    assert reports[0].buckets > 4
    tensors = reports[2].verified_tensors
    assert [report.verified_tensors for report in reports] == [2 * tensors, 2 * tensors, tensors]
    assert groups[0] == groups[1] == groups[2] != groups[3]
    assert version == 5
    # One deadline of the broadcast that broke off, at most, and the version again.
    assert seconds < 2 * TIMEOUT_S
