"""`p2p` to an engine whose ranks are on two nodes and to one on the second node, here servers on this machine.

What several ranks of the engine keep comes once from the trainer, goes once to the other node, and on within each.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_probes import KEY, engine_tokens, serves, transformers_tokens
from peer_counts import kept_bytes, tensor_bytes
from ranks import run_ranks
from slimrl_tools.toy.toy import ToySize, write_toy
from weight_sender import WeightSender

from slimrl.config.schema.precision import Precision
from slimrl.config.schema.resync import ResyncConfig, TransportName, VerifyMode
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.config.schema.trainer import ParallelConfig
from slimrl.engines.servers.control import SglangControl
from slimrl.engines.servers.ports import free_port
from slimrl.engines.servers.server import EnginePart, EngineServer
from slimrl.resync.session import ResyncSession

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(500)]

TIMEOUT_S = 90.0
NODES = ("a", "b")
SPREAD = RolloutConfig(
    engine_tp=4, engine_ep=2, engine_nodes=2, max_trajectory_tokens=128, sglang={"max_total_tokens": 4096}
)
ALONE = RolloutConfig(engine_tp=2, max_trajectory_tokens=128, sglang={"max_total_tokens": 4096})


def controls_of(urls: list[str]) -> list[SglangControl]:
    places = [(4, NODES), (2, NODES[1:])]
    return [
        SglangControl(f"engine {index}", url, timeout_s=TIMEOUT_S, num_ranks=num_ranks, nodes=nodes, key=KEY)
        for index, (url, (num_ranks, nodes)) in enumerate(zip(urls, places, strict=True))
    ]


def send_both(rank, world_size, port, paths, urls, parallel):
    """The reports of both checkpoints, one after the other, and the bytes that each rank of each engine keeps."""
    sender = WeightSender(rank, world_size, port, paths[0], parallel, timeout_s=TIMEOUT_S)
    controls = controls_of(urls)
    config = ResyncConfig(
        transport=TransportName.p2p, bucket_bytes=300_000, verify=VerifyMode.full, timeout_s=TIMEOUT_S
    )
    session = ResyncSession(
        sender.source, controls, config, rank=rank, run_id="test-p2p", node=NODES[rank // (world_size // 2)]
    )
    reports = []
    for version, path in enumerate(reversed(paths), 1):
        sender.load(path)
        reports.append(session.run(version))
    sizes = tensor_bytes(sender.source)
    kept = {control.name: kept_bytes(control, sizes) for control in controls} if rank == 0 else {}
    session.close()
    sender.close()
    return reports, kept


@pytest.fixture(params=["qwen3_moe", "deepseek_v3"])
def paths(request, tmp_path):
    """Two checkpoints; the engines start with the first."""
    made = [tmp_path / name for name in "ab"]
    for seed, path in enumerate(made):
        write_toy(request.param, path, ToySize(init_std=0.1), seed)
    return made


@pytest.fixture
def servers(paths, tmp_path) -> Iterator[list[EngineServer]]:
    """The parts of the engine over two nodes, and the other engine."""
    meeting = f"127.0.0.1:{free_port()}"
    started: list[EngineServer] = []
    try:
        for number in range(len(NODES)):
            part, log = EnginePart(number=number, meeting=meeting), tmp_path / f"part_{number}.log"
            started.append(EngineServer(0, SPREAD, paths[0], log, precision=Precision.fp32, part=part, key=KEY))
        log = tmp_path / "alone.log"
        started.append(EngineServer(1, ALONE, paths[0], log, precision=Precision.fp32, key=KEY))
        with ThreadPoolExecutor() as pool:
            list(pool.map(EngineServer.wait_ready, started))
        yield started
    finally:
        for server in started:
            server.stop()


@pytest.mark.parametrize(
    ("num_ranks", "parallel"), [(2, ParallelConfig(expert=2)), (4, ParallelConfig(tensor=2, expert=2))]
)
def test_ranks_on_both_nodes_send_each_byte_once_to_engines_on_both(paths, servers, num_ranks, parallel):
    urls = [servers[0].url, servers[2].url]
    (reports, kept), *_ = run_ranks(send_both, num_ranks, paths, urls, parallel, timeout_s=300)
    for report in reports:
        assert report.mismatching == ()
        assert report.failed_engines == {}
        assert {name: list(got) for name, got in report.received_per_rank.items()} == kept
        assert sum(report.sent_per_rank) == 2 * report.bytes
        share = sum(report.sent_per_rank) / num_ranks
        assert all(abs(sent - share) < 0.1 * share for sent in report.sent_per_rank)
    for url in urls:
        assert serves(url, paths[0])
        assert engine_tokens(url) == transformers_tokens(paths[0])
