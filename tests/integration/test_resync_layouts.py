"""Every transport, from trainers of four ranks under every kind of layout, into real engines of one and of two ranks.

A version is seen to arrive in two ways: by the fingerprints of all tensors on both engines, and by log-probs, which
are those of transformers. Neighbouring versions have different weights, so nothing passes by staying as it was.
"""

from pathlib import Path

import pytest
from engine_probes import KEY, engine_logprobs, transformers_logprobs
from fleet import Fleet
from ranks import run_ranks
from slimrl_tools.toy.toy import ToySize, write_toy
from weight_cases import MOE_LAYOUTS_OF_4
from weight_sender import WeightSender

from slimrl.config.schema.precision import Precision
from slimrl.config.schema.resync import ResyncConfig, TransportName, VerifyMode
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.config.schema.trainer import ParallelConfig
from slimrl.engines.servers.control import SglangControl
from slimrl.engines.servers.server import EngineServer
from slimrl.resync.session import ResyncSession

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(400)]

TIMEOUT_S = 60.0
BUCKET_BYTES = 120_000
"""Cuts the embedding, the output layer and most of what attention has."""
VERSIONS = (TransportName.ipc, TransportName.p2p, TransportName.disk, TransportName.delta, TransportName.delta)
"""Transports of each layout's versions, in this order; the first `delta` is whole."""


def send_all(rank, world_size, port, checkpoints, expected, engines, folder):
    """(layout, transport, what is wrong) of every version that did not arrive as it should, and versions sent."""
    sender = WeightSender(rank, world_size, port, checkpoints[0], ParallelConfig())
    controls = [
        SglangControl(f"engine {index}", url, timeout_s=TIMEOUT_S, num_ranks=num_ranks, key=KEY)
        for index, (url, num_ranks, _) in enumerate(engines)
    ]
    wrong, version = [], 0
    for name, parallel in MOE_LAYOUTS_OF_4.items():
        sender.use_layout(parallel)
        for transport in dict.fromkeys(VERSIONS):
            config = ResyncConfig(
                transport=transport, bucket_bytes=BUCKET_BYTES, verify=VerifyMode.full, timeout_s=TIMEOUT_S,
                dir=str(folder / "versions"), local_dir=str(folder / "local"), keep=1,
            )  # fmt: skip
            session = ResyncSession(
                sender.source, controls, config, rank=rank, run_id=f"{name}-{transport.value}",
                model_dir=checkpoints[0],
            )  # fmt: skip
            for _ in range(VERSIONS.count(transport)):
                version += 1
                which = version % len(checkpoints)
                sender.load(checkpoints[which])
                report = session.run(version)
                if report is not None:
                    complaints = complaints_of(report, len(sender.source.layout()), engines, expected[which])
                    wrong += [(name, transport.value, complaint) for complaint in complaints]
            session.close()
    sender.close()
    return wrong, version


def complaints_of(report, num_tensors, engines, expected_T) -> list[str]:
    if report.mismatching:
        # Nobody was resumed, so nobody answers.
        return [f"{len(report.mismatching)} tensors differ, {', '.join(report.mismatching[:3])}"]
    complaints = list(report.failed_engines.values())
    if report.verified_tensors != num_tensors * len(engines):
        complaints.append(f"{report.verified_tensors} tensors compared")
    for url, num_ranks, groups in engines:
        for group in range(groups):
            difference = float((engine_logprobs(url, group=group) - expected_T).abs().max())
            if not difference < 2e-5:
                complaints.append(f"engine of {num_ranks}, group {group}: log-probs differ by {difference:.3g}")
    return complaints


@pytest.mark.parametrize(("engine_ep", "groups"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_every_transport_brings_what_trainers_of_four_ranks_hold_to_engines_of_one_and_two(
    tmp_path: Path, family, engine_ep, groups
):
    checkpoints = [tmp_path / name for name in "ab"]
    for seed, path in enumerate(checkpoints):
        write_toy(family, path, ToySize(), seed)
    expected = [transformers_logprobs(path) for path in checkpoints]
    assert (expected[0] - expected[1]).abs().max() > 0.1
    common = {"max_trajectory_tokens": 128, "sglang": {"max_total_tokens": 4096}}
    with Fleet(RolloutConfig(num_engines=1, **common), checkpoints[0], tmp_path, precision=Precision.fp32) as fleet:
        rollout = RolloutConfig(engine_tp=2, engine_ep=engine_ep, engine_attention_dp=groups, **common)
        fleet.engines.append(
            EngineServer(1, rollout, checkpoints[0], tmp_path / "two.log", precision=Precision.fp32, key=KEY)
        )
        fleet.engines[1].wait_ready()
        engines = list(zip(fleet.engine_urls, (1, 2), (1, groups), strict=True))
        (wrong, sent), *_ = run_ranks(send_all, 4, checkpoints, expected, engines, tmp_path, timeout_s=330)
    assert wrong == []
    assert sent == len(MOE_LAYOUTS_OF_4) * len(VERSIONS)
