"""Broadcasts from two trainer ranks to two engines, one of them with two ranks that hold different experts.

Each trainer rank holds half of the experts, and sends those that are large enough itself.
"""

import itertools
import os
import signal
import threading
import time

import pytest
from ranks import run_ranks
from slimrl_tools.toy import ToySize, write_toy
from weight_sender import WeightSender

from slimrl.config.schema import (
    ParallelConfig,
    Precision,
    ResyncConfig,
    RolloutConfig,
    TransportName,
    VerifyMode,
)
from slimrl.data.protocols import EngineError
from slimrl.resync.report import ResyncError
from slimrl.resync.session import ResyncSession
from slimrl.resync.transports.collective import CollectiveTransport
from slimrl.rollout.control import SglangControl
from slimrl.rollout.server import EngineServer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

TIMEOUT_S = 20.0
BUCKET_BYTES = 300_000


class KillingTransport(CollectiveTransport):
    """Kills a process while a bucket of the version is broadcast."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.pid_to_kill = None
        self.group_names = []
        # Experts of the toy are among these.
        self.in_place_bytes = 4000

    def begin(self, version):
        super().begin(version)
        self.group_names.append(self.group.name)

    def send(self, bucket, buffer, live):
        if self._num_sent == 2 and self.pid_to_kill is not None:
            threading.Thread(target=os.kill, args=(self.pid_to_kill, signal.SIGKILL)).start()
            self.pid_to_kill = None
        super().send(bucket, buffer, live)


def broadcast_versions(rank, world_size, port, paths, engines):
    """Two versions to both engines, then one in which engine 0 is killed.

    Returns:
        Reports, names of groups, seconds of the third version, the version that engine 1 serves, and the ranks that
        send, on rank 0; bytes that rank 1 sent of each version there.
    """
    sender = WeightSender(rank, world_size, port, paths[0], ParallelConfig(expert=2), timeout_s=90.0)
    controls = [
        SglangControl(f"engine {index}", url, timeout_s=TIMEOUT_S, num_ranks=num_ranks)
        for index, (url, num_ranks, _) in enumerate(engines)
    ]
    config = ResyncConfig(
        transport=TransportName.collective, bucket_bytes=BUCKET_BYTES, verify=VerifyMode.full, timeout_s=TIMEOUT_S
    )
    transport = KillingTransport("127.0.0.1", "slimrl-test", TIMEOUT_S, bucket_bytes=BUCKET_BYTES)
    session = ResyncSession(sender.source, controls, config, rank=rank, run_id="test-collective", transport=transport)
    reports, seconds, sent = [], 0.0, []
    send = session._contribution.send

    def count(live):
        send(live)
        sent[-1] += sum(map(len, live.own.values()))

    session._contribution.send = count
    for version, path in enumerate(paths, 1):
        sender.load(path)
        sent.append(0)
        if version == 3:
            transport.pid_to_kill = engines[0][2]
        start = time.monotonic()
        reports.append(session.run(version))
        seconds = time.monotonic() - start
    session.use(controls[1:])
    session._contribution.send = send
    one_fault_after_another(session, controls[1], rank)
    versions = controls[1].version() if rank == 0 else None
    sources = session._pipeline.sources
    session.close()
    sender.close()
    return (reports, transport.group_names[:4], seconds, versions, sources) if rank == 0 else sent


def one_fault_after_another(session, engine, rank):
    """Of a living engine and of rank 1, each in the middle of a version that the next attempt completes."""
    contribution, send = session._contribution, session._contribution.send

    def break_off(live):
        if len(live.own) > 2:
            raise EngineError("broadcast: planted")
        send(live)

    def leave(live):
        if len(live.own) > 2:
            contribution.leave()
            raise EngineError("broadcast: planted")
        send(live)

    def refused(call, number):
        """The call of this number, from 0."""
        numbers = itertools.count()

        def answer(*arguments):
            if next(numbers) == number:
                raise EngineError("planted")
            call(*arguments)

        return answer

    for version, fault in enumerate((break_off, leave), 4):
        contribution.send = fault
        start = time.monotonic()
        with pytest.raises(ResyncError, match="planted"):
            session.run(version)
        assert time.monotonic() - start < TIMEOUT_S / 2
        contribution.send = send
        assert_complete(session.run(version), rank)
    for version, name, number in ((6, "load_received", 2), (7, "pause", 0)):
        call = getattr(engine, name)
        setattr(engine, name, refused(call, number))
        start = time.monotonic()
        assert_complete(session.run(version), rank)
        assert time.monotonic() - start < TIMEOUT_S / 2
        setattr(engine, name, call)


def assert_complete(report, rank):
    assert rank or (report.mismatching, report.failed_engines) == ((), {})


@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("deepseek_v3", marks=pytest.mark.full)])
def test_engines_of_one_and_two_ranks_get_every_version_and_a_killed_one_does_not_hold_up_the_other(tmp_path, family):
    paths = [tmp_path / name for name in "abc"]
    for seed, path in enumerate(paths):
        write_toy(family, path, ToySize(), seed)
    servers = []
    for index, num_ranks in enumerate((1, 2)):
        rollout = RolloutConfig(
            engine_tensor=num_ranks,
            engine_expert=num_ranks,
            max_trajectory_tokens=128,
            sglang={"max_total_tokens": 4096},
        )
        log = tmp_path / f"engine_{index}.log"
        servers.append(EngineServer(index, rollout, paths[0], log, precision=Precision.fp32))
    try:
        for server in servers:
            server.wait_ready()
        engines = [
            (server.url, num_ranks, server.process.pid) for server, num_ranks in zip(servers, (1, 2), strict=True)
        ]
        first, sent = run_ranks(broadcast_versions, 2, paths, engines, timeout_s=200)
        reports, groups, seconds, version, sources = first
    finally:
        for server in servers:
            server.stop()
    assert [report.mismatching for report in reports] == [(), (), ()]
    assert [list(report.failed_engines) for report in reports] == [[], [], ["engine 0"]]
    assert reports[0].buckets > 4
    tensors = reports[2].verified_tensors
    assert [report.verified_tensors for report in reports] == [2 * tensors, 2 * tensors, tensors]
    assert groups[0] == groups[1] == groups[2] != groups[3]
    assert version == 7
    # Half of the experts, and most of the bytes are experts'.
    assert sources == [0, 1]
    assert sent[0] == sent[1] > reports[0].bytes / 4
    # One deadline of the broadcast that broke off, at most, and the version again.
    assert seconds < 2 * TIMEOUT_S
