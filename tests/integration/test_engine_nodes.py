"""An engine whose ranks are on two nodes, here two servers on this machine that know each other by an address alone."""

import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir
from pathlib import Path

import pytest
import torch
from checkpoint_source import CheckpointSource
from engine_probes import KEY, serves
from safetensors.torch import load_file
from slimrl_tools.toy.toy import ToySize, write_toy

from slimrl.config.schema.precision import Precision
from slimrl.config.schema.resync import ResyncConfig, TransportName, VerifyMode
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.engines.servers.control import EngineMemory, SglangControl
from slimrl.engines.servers.ports import free_port
from slimrl.engines.servers.process import ServerError
from slimrl.engines.servers.server import EnginePart, EngineServer
from slimrl.models.fingerprint import fingerprint
from slimrl.resync.session import ResyncSession

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

ENDS_WITHIN_S = 30.0
TIMEOUT_S = 60.0
NODES = ("a", "b")
LOCAL = "/proc/self/cwd/local"
"""A folder of each process's own, as a local disk is of each node: it follows the working directory."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With two models, and a working directory for the trainer and each node of the engine."""
    path = tmp_path_factory.mktemp("engine_nodes")
    for seed, name in enumerate(("first", "second")):
        write_toy("qwen3_moe", path / name, ToySize(init_std=0.1), seed=seed)
    for name in ("trainer", *NODES):
        (path / name).mkdir()
    return path


@pytest.fixture(scope="module")
def parts(folder: Path) -> Iterator[list[EngineServer]]:
    rollout = RolloutConfig(engine_tp=2, engine_nodes=2, max_trajectory_tokens=128, max_concurrency_per_engine=8)
    meeting = f"127.0.0.1:{free_port()}"
    started = []
    try:
        for number, node in enumerate(NODES):
            with chdir(folder / node):
                part, log = EnginePart(number=number, meeting=meeting), folder / f"part_{number}.log"
                started.append(
                    EngineServer(0, rollout, folder / "first", log, precision=Precision.fp32, part=part, key=KEY)
                )
        with ThreadPoolExecutor() as pool:
            list(pool.map(EngineServer.wait_ready, started))
        yield started
    finally:
        for server in started:
            server.stop()


@pytest.fixture
def control(parts: list[EngineServer]) -> Iterator[SglangControl]:
    made = SglangControl("engine 0", parts[0].url, timeout_s=TIMEOUT_S, num_ranks=2, nodes=NODES, key=KEY)
    yield made
    made.close()


def session_of(folder: Path, engine: SglangControl, source: CheckpointSource, transport: TransportName):
    config = ResyncConfig(
        transport=transport, bucket_bytes=200_000, verify=VerifyMode.full, timeout_s=TIMEOUT_S,
        dir=str(folder / "versions"), local_dir=LOCAL,
    )  # fmt: skip
    run_id, model_dir = transport.value, folder / "second"
    return ResyncSession(source, [engine], config, rank=0, run_id=run_id, model_dir=model_dir)


def keep_checking(server: EngineServer) -> None:
    deadline = time.monotonic() + ENDS_WITHIN_S
    while time.monotonic() < deadline:
        server.check()
        time.sleep(0.2)


@pytest.mark.full
def test_an_engine_over_two_nodes_computes_with_its_weights_and_names_them(
    folder: Path, parts: list[EngineServer], control: SglangControl
):
    path = folder / "first"
    assert serves(parts[0].url, path)
    prints = control.fingerprints(None)
    tensors = {name: value for file in path.glob("*.safetensors") for name, value in load_file(file).items()}
    assert {name: prints.get(name) for name in tensors} == {name: fingerprint(tensors[name]) for name in tensors}
    control.release_memory(list(EngineMemory))
    control.resume_memory(list(EngineMemory))
    control.resume()


@pytest.mark.full
@torch.no_grad()
def test_it_loads_versions_from_folders_and_deltas_into_a_copy_on_each_node(
    folder: Path, parts: list[EngineServer], control: SglangControl
):
    source = CheckpointSource(folder / "second")
    with chdir(folder / "trainer"):
        session = session_of(folder, control, source, TransportName.disk)
        assert session.run(1).mismatching == ()
        session.close()
        assert serves(parts[0].url, folder / "second")

        session = session_of(folder, control, source, TransportName.delta)
        copies = [folder / node / "local" / "delta" / "engine_0" / "checkpoint" for node in NODES]
        changed = []
        for version in (2, 3, 4):
            for tensor in list(source.weights.values())[version::3]:
                tensor.view(-1)[::version] *= 1.05
            if version == 4:
                # A node that has lost its disk takes the whole version and the deltas since then.
                shutil.rmtree(folder / NODES[1] / "local")
            report = session.run(version)
            assert (report.mismatching, report.failed_engines) == ((), {})
            changed.append(report.changed_fraction)
            held = [{file.name: file.read_bytes() for file in copy.iterdir()} for copy in copies]
            assert held[0] == held[1]
            assert serves(parts[0].url, copies[1])
        session.close()
    assert changed[0] is None
    assert all(0 < fraction < 0.3 for fraction in changed[1:])


@pytest.mark.full
def test_what_is_left_of_it_ends_by_itself_when_a_part_has_ended(parts: list[EngineServer]):
    parts[1].stop()
    with pytest.raises(ServerError):
        keep_checking(parts[0])
