"""Engines of a checkpoint in block FP8, sent plain weights, and corruption that verification must find."""

from pathlib import Path

import pytest
import torch
from checkpoint_source import CheckpointSource
from cli_runs import RECIPES, make_workspace, succeed
from engine_probes import KEY
from ranks import run_ranks
from safetensors.torch import load_file
from slimrl_tools.derive.quantize import quantization
from slimrl_tools.derive.rewrite import write_checkpoint
from slimrl_tools.toy.toy import ToySize, write_toy
from weight_sender import WeightSender

from slimrl import device
from slimrl.checkpoints.checkpoint_reader import read_whole
from slimrl.checkpoints.hf_check import check_checkpoint
from slimrl.checkpoints.hf_checkpoint import is_block_fp8, open_hf_checkpoint, open_stored
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.resync import ResyncConfig, TransportName, VerifyMode
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.config.schema.trainer import ParallelConfig
from slimrl.data.peer_messages import views
from slimrl.engines.servers.control import SglangControl
from slimrl.engines.servers.server import EngineServer
from slimrl.models.fingerprint import fingerprint
from slimrl.models.hf_config import read_hf_config
from slimrl.observability.metrics import read_metrics
from slimrl.quantization.fp8 import dequantize, quantize
from slimrl.resync.ipc import transfer
from slimrl.resync.ipc.rank_rounds import RankRounds
from slimrl.resync.session import ResyncSession
from slimrl.rollout.task.engine_format import engine_transform

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(300),
    pytest.mark.skipif(device.device_type() == "cuda", reason="of engines that cannot compute with FP8"),
]

BLOCK = (24, 28)
"""Tiles of which none of the toy's matrices is a multiple."""
SPOILED = "model.layers.1.mlp.experts.3.down_proj.weight"
BOUND = 6
"""Versions in which a sample of each finds what is wrong"""
TIMEOUT_S = 60.0
DENSE = ["trainer.parallel.expert=1", "rollout.routed_experts=false"]


class SpoilingRounds(RankRounds):
    """Flips one bit of one expert after the round was written."""

    def _write(self, placings):
        super()._write(placings)
        for each, memory in placings:
            for entry, value in views(each.message.entries, memory):
                if entry.name == SPOILED:
                    value.view(torch.uint8).view(-1)[4 * 77] ^= 1


@pytest.fixture(
    scope="module",
    params=[
        "qwen3_moe",
        "qwen3_vl_moe",
        pytest.param("qwen3_5_moe_wrapped", marks=pytest.mark.full),
    ],
)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(a checkpoint in block FP8, other plain weights of the model)"""
    folder = tmp_path_factory.mktemp("models")
    size = ToySize(layers=4 if request.param == "qwen3_5_moe_wrapped" else 2, hidden=64, moe_intermediate=40)
    for seed, name in enumerate(("first", "second")):
        write_toy(request.param, folder / name, size, seed=seed)
    with open_stored(folder / "first") as plain:
        write_checkpoint(quantization(plain, BLOCK, []), folder / "fp8", resume=False)
    return folder / "fp8", folder / "second"


@pytest.fixture(scope="module")
def server(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory):
    """Serves the checkpoint in block FP8."""
    rollout = RolloutConfig(max_trajectory_tokens=128, sglang={"max_total_tokens": 4096})
    log = tmp_path_factory.mktemp("engine") / "engine.log"
    server = EngineServer(0, rollout, models[0], log, precision=Precision.fp32, key=KEY)
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def engine(server: EngineServer) -> SglangControl:
    return SglangControl("engine 0", server.url, timeout_s=TIMEOUT_S, key=KEY)


def test_an_engine_without_fp8_starts_with_the_values_that_the_checkpoint_stands_for(models, engine):
    assert is_block_fp8(models[0])
    with open_hf_checkpoint(models[0], "float32") as folder:
        expected = {name: fingerprint(read_whole(folder, name)) for name in folder.specs}
    assert engine.fingerprints(list(expected)) == expected


@pytest.mark.parametrize("transport", [TransportName.ipc, TransportName.p2p])
def test_it_is_sent_the_values_that_quantisation_leaves_of_the_weights(models, engine, transport):
    source = CheckpointSource(models[1])
    transform = engine_transform(models[0])
    config = ResyncConfig(transport=transport, bucket_bytes=200_000, verify=VerifyMode.full, timeout_s=TIMEOUT_S)
    session = ResyncSession(source, [engine], config, rank=0, run_id="fp8", transform=transform)
    report = session.run(1)
    session.close()
    assert report.mismatching == ()
    assert report.verified_tensors == len(source.specs)
    changed = [spec.name for spec in source.specs if transform.changes(spec)]
    assert SPOILED in changed
    expected = {name: fingerprint(value) for name, value in source.weights.items()}
    for name in changed:
        expected[name] = fingerprint(dequantize(*quantize(source.weights[name], BLOCK), torch.float32, BLOCK))
    assert engine.fingerprints(list(expected)) == expected


def send_shared_tiles(rank, world_size, port, fp8, second, url):
    """From two ranks of tensor parallelism, whose shards begin and end within tiles."""
    sender = WeightSender(rank, world_size, port, fp8, ParallelConfig(tensor=2), timeout_s=90.0)
    sender.load(second)
    control = SglangControl("engine 0", url, timeout_s=TIMEOUT_S, key=KEY)
    config = ResyncConfig(
        transport=TransportName.p2p, bucket_bytes=200_000, verify=VerifyMode.full, timeout_s=TIMEOUT_S
    )
    transform = engine_transform(fp8)
    session = ResyncSession(sender.source, [control], config, rank=rank, run_id="fp8-p2p", transform=transform)
    report = session.run(1)
    session.close()
    sender.close()
    return report


def test_tiles_that_two_ranks_share_are_quantised_as_one(models, server, engine):
    report, _ = run_ranks(send_shared_tiles, 2, *models, server.url, timeout_s=200)
    assert report.mismatching == ()
    source = CheckpointSource(models[1])
    transform = engine_transform(models[0])
    expected = {name: fingerprint(value) for name, value in source.weights.items()}
    for spec in source.specs:
        if transform.changes(spec):
            rounded = dequantize(*quantize(source.weights[spec.name], BLOCK), torch.float32, BLOCK)
            expected[spec.name] = fingerprint(rounded)
    assert engine.fingerprints(list(expected)) == expected


@pytest.mark.parametrize("quantised", [False, True])
def test_one_corrupted_element_is_named_by_full_at_once_and_by_sampled_within_its_bound(
    models, engine, quantised, monkeypatch
):
    source = CheckpointSource(models[1])
    transform = engine_transform(models[0]) if quantised else None

    monkeypatch.setattr(transfer, "RankRounds", SpoilingRounds)

    def run(verify: VerifyMode, versions: range) -> list[tuple[str, ...]]:
        config = ResyncConfig(
            bucket_bytes=200_000, verify=verify, sampled_versions=BOUND, sampled_bytes=1, timeout_s=TIMEOUT_S
        )
        session = ResyncSession(
            source, [engine], config, rank=0, run_id="spoiled", transform=transform,
        )  # fmt: skip
        found = [session.run(version).mismatching for version in versions]
        session.close()
        return found

    named = (f"engine 0: {SPOILED}",)
    assert run(VerifyMode.full, range(1, 2)) == [named]
    found = run(VerifyMode.sampled, range(2, 2 + BOUND))
    assert found.count(named) == 1
    assert found.count(()) == BOUND - 1


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3_moe", []),
        ("qwen3_vl", DENSE),
        ("qwen3_vl_moe", []),
        ("qwen3_5_wrapped", DENSE),
        ("qwen3_5_moe_wrapped", []),
    ],
)
def test_a_run_trains_plain_weights_for_engines_of_a_quantised_checkpoint(tmp_path, family, settings):
    workspace = make_workspace(tmp_path, family)
    with open_stored(tmp_path / "model") as plain:
        write_checkpoint(quantization(plain, (16, 16), []), tmp_path / "fp8", resume=False)
    common = [f"model.path={tmp_path / 'fp8'}", "steps=2", "resync.verify=full", "algorithm.max_logprob_mismatch=0.5"]
    overrides = workspace.overrides(*common, "agent.parser=qwen25", *settings)
    succeed("train", str(RECIPES / "gspo_calculator.yaml"), *overrides, timeout_s=400)
    folder = workspace.run_folder("gspo")
    lines = read_metrics(folder.metrics)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert [line["resync/fingerprint_mismatches"] for line in lines] == [0, 0, 0]
    # Dequantised weights are quantised to themselves; after an update the trainer computes with unrounded ones.
    assert lines[1]["mismatch/logprob_abs_mean"] < 1e-5
    assert 1e-3 < lines[2]["mismatch/logprob_abs_mean"] < 0.5
    assert "quantization_config" not in read_hf_config(folder.export)
    check_checkpoint(folder.export)
    exported, given = (
        {name: value for file in path.glob("*.safetensors") for name, value in load_file(file).items()}
        for path in (folder.export, tmp_path / "fp8")
    )
    assert {value.dtype for value in exported.values()} == {torch.float32}
    assert exported.keys() == {name for name in given if not name.endswith("_scale_inv")}
    vision = [name for name in given if ".visual." in name]
    assert bool(vision) == (family != "qwen3_moe")
    assert all(exported[name].equal(given[name]) for name in vision)
