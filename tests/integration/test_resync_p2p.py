"""Versions that every trainer rank sends to the engine ranks that keep what it holds, over real engines."""

import os
import signal
import threading
import time

import pytest
from engine_probes import KEY, engine_logprobs, transformers_logprobs
from fleet import Fleet
from peer_counts import kept_bytes, tensor_bytes
from ranks import run_ranks
from slimrl_tools.toy.toy import ToySize, write_toy
from weight_sender import WeightSender

from slimrl.config.schema.precision import Precision
from slimrl.config.schema.resync import ResyncConfig, TransportName, VerifyMode
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.config.schema.trainer import ParallelConfig
from slimrl.engines.servers.control import SglangControl
from slimrl.engines.servers.server import EngineServer
from slimrl.observability.memory import session_members
from slimrl.resync.p2p.sender import EngineSender
from slimrl.resync.session import ResyncReport, ResyncSession

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

SIZE = ToySize(init_std=0.1)
TIMEOUT_S = 20.0
BUCKET_BYTES = 300_000


def config(timeout_s: float = TIMEOUT_S) -> ResyncConfig:
    return ResyncConfig(
        transport=TransportName.p2p, bucket_bytes=BUCKET_BYTES, verify=VerifyMode.full, timeout_s=timeout_s
    )


def controls_of(engines, timeout_s: float = TIMEOUT_S) -> list[SglangControl]:
    return [
        SglangControl(f"engine {index}", url, timeout_s=timeout_s, num_ranks=num_ranks, key=KEY)
        for index, (url, num_ranks, _) in enumerate(engines)
    ]


def send_versions(rank, world_size, port, paths, engines, parallel) -> tuple[list[ResyncReport | None], dict]:
    sender = WeightSender(rank, world_size, port, paths[0], parallel, timeout_s=90.0)
    controls = controls_of(engines)
    session = ResyncSession(sender.source, controls, config(), rank=rank, run_id="test-p2p")
    reports = []
    for version, path in enumerate(paths, 1):
        sender.load(path)
        reports.append(session.run(version))
    kept = {control.name: kept_bytes(control, tensor_bytes(sender.source)) for control in controls} if rank == 0 else {}
    session.close()
    sender.close()
    return reports, kept


@pytest.mark.parametrize(
    ("num_ranks", "parallel", "sizes"),
    [
        (2, ParallelConfig(expert=2), (1,)),
        (1, ParallelConfig(), (1, 1)),
        pytest.param(2, ParallelConfig(expert=2), (1, 2), marks=pytest.mark.full),
        pytest.param(4, ParallelConfig(tensor=2, expert=2), (2, 2), marks=pytest.mark.full),
        pytest.param(2, ParallelConfig(pipeline=2), (1,), marks=pytest.mark.full),
    ],
    ids=["one engine", "an engine feeds another", "sizes 1 and 2", "four ranks", "two stages"],
)
def test_each_byte_comes_once_to_each_rank_that_keeps_it(tmp_path, num_ranks, parallel, sizes):
    paths = [tmp_path / name for name in "ab"]
    for seed, path in enumerate(paths):
        write_toy("qwen3_moe", path, SIZE, seed)
    servers = []
    try:
        for index, tensor in enumerate(sizes):
            rollout = RolloutConfig(
                engine_tp=tensor, engine_ep=tensor, max_trajectory_tokens=128, sglang={"max_total_tokens": 4096}
            )
            log = tmp_path / f"engine_{index}.log"
            servers.append(EngineServer(index, rollout, paths[0], log, precision=Precision.fp32, key=KEY))
        for server in servers:
            server.wait_ready()
        engines = [(server.url, tensor, server.process.pid) for server, tensor in zip(servers, sizes, strict=True)]
        (reports, kept), *_ = run_ranks(send_versions, num_ranks, paths, engines, parallel, timeout_s=250)
        expected = transformers_logprobs(paths[1])
        assert all((engine_logprobs(server.url) - expected).abs().max() < 2e-5 for server in servers)
    finally:
        for server in servers:
            server.stop()
    for report in reports:
        assert report.mismatching == ()
        assert report.failed_engines == {}
        assert {name: list(got) for name, got in report.received_per_rank.items()} == kept
        # Engines of more ranks than the trainer's feed each other, if they are alike.
        heads = 1 if sizes == (1, 1) else len(sizes)
        assert sum(report.sent_per_rank) == heads * report.bytes
        if parallel.pipeline == 1:
            share = sum(report.sent_per_rank) / num_ranks
            assert all(abs(sent - share) < 0.1 * share for sent in report.sent_per_rank)


FAULT_TIMEOUT_S = 6.0


def signal_engine(pid: int, number: signal.Signals) -> None:
    for each in session_members(pid):
        os.kill(each, number)


def act(action: str, pid: int) -> None:
    if action == "kill":
        signal_engine(pid, signal.SIGKILL)
    else:
        signal_engine(pid, signal.SIGSTOP)
        if action == "slow":
            threading.Timer(1.5, signal_engine, (pid, signal.SIGCONT)).start()


def break_in_the_middle(rank, world_size, port, paths, engines, action):
    """Version 2 while something happens to engine 0 between two rounds; then version 3, to engine 1 alone."""
    sender = WeightSender(rank, world_size, port, paths[0], ParallelConfig(expert=2), timeout_s=90.0)
    controls = controls_of(engines, FAULT_TIMEOUT_S)
    session = ResyncSession(sender.source, controls, config(FAULT_TIMEOUT_S), rank=rank, run_id="test-p2p")
    session.run(1)
    sender.load(paths[1])
    faulty, original, fills = session._transfer._senders["engine 0"], EngineSender._fill, []

    def fill(self, slot, messages, values):
        if self is faulty:
            fills.append(len(messages))
            if len(fills) == 4 and rank == 0 and action != "wrong length":
                act(action, engines[0][2])
        return original(self, slot, messages, values)

    tell = faulty._group.tell

    def tell_wrong(peers, numbers, deadline):
        wrong = len(fills) == 4 and rank == 0 and action == "wrong length"
        return tell(peers, [(*each[:2], each[2] + 8) for each in numbers] if wrong else numbers, deadline)

    EngineSender._fill, faulty._group.tell = fill, tell_wrong
    start = time.monotonic()
    report = session.run(2)
    seconds = time.monotonic() - start
    signal_engine(engines[0][2], signal.SIGCONT)
    session.use(controls[1:])
    last = session.run(3)
    versions = [control.version() for control in controls[1:]]
    session.close()
    sender.close()
    return report, last, seconds, versions, len(fills)


@pytest.mark.parametrize(
    ("action", "lost", "bound_s"),
    [
        ("kill", ["engine 0"], FAULT_TIMEOUT_S),
        pytest.param("stop", ["engine 0"], 2.5 * FAULT_TIMEOUT_S + 6, marks=pytest.mark.full),
        pytest.param("slow", [], FAULT_TIMEOUT_S, marks=pytest.mark.full),
        pytest.param("wrong length", [], FAULT_TIMEOUT_S, marks=pytest.mark.full),
    ],
)
def test_what_happens_to_an_engine_in_the_middle_of_a_version_is_its_own_affair(tmp_path, action, lost, bound_s):
    paths = [tmp_path / name for name in "ab"]
    for seed, path in enumerate(paths):
        write_toy("qwen3_moe", path, SIZE, seed)
    rollout = RolloutConfig(num_engines=2, max_trajectory_tokens=128, sglang={"max_total_tokens": 4096})
    with Fleet(rollout, paths[0], tmp_path, precision=Precision.fp32) as fleet:
        fleet.wait_ready()
        engines = [(server.url, 1, server.process.pid) for server in fleet.engines]
        (report, last, seconds, versions, fills), _ = run_ranks(
            break_in_the_middle, 2, paths, engines, action, timeout_s=200
        )
        expected = transformers_logprobs(paths[1])
        assert (engine_logprobs(engines[1][0]) - expected).abs().max() < 2e-5
    assert report.buckets > 4
    assert fills >= 4
    assert list(report.failed_engines) == lost
    assert report.mismatching == ()
    # The other got it once.
    assert sum(report.received_per_rank["engine 1"]) == report.bytes
    assert seconds < bound_s
    assert last.failed_engines == {}
    assert versions == [3]
