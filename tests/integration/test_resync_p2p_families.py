"""Weights of every family, sent by `p2p` to engines of every layout that had other ones, against SGLang's own loading.

The engine loads a first checkpoint by itself, gets a second one from the trainer, and then loads the second one by
itself too. What it was sent must be what it loads, bit for bit, and what it computes must be what transformers does.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_layouts import ENGINE_LAYOUTS
from engine_probes import KEY, engine_logprobs, engine_tokens, transformers_logprobs, transformers_tokens
from peer_counts import kept_bytes, tensor_bytes
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from slimrl_tools.toy.toy import ToySize, write_toy
from weight_sender import WeightSender

from slimrl.config.hf_config import num_experts
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.resync import ResyncConfig, TransportName, VerifyMode
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.config.schema.trainer import ParallelConfig
from slimrl.engines.servers.control import SglangControl
from slimrl.engines.servers.server import EngineServer
from slimrl.models.hf_config import read_hf_config
from slimrl.resync.session import ResyncReport, ResyncSession

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

SIZE = ToySize(init_std=0.1)
TIMEOUT_S = 90.0
CONFIG = ResyncConfig(transport=TransportName.p2p, bucket_bytes=300_000, verify=VerifyMode.full, timeout_s=TIMEOUT_S)
WITH_FLOAT32 = ("deepseek_v32", "glm4_moe", "minimax_m2", "qwen3_next", "qwen3_5_moe", "kimi_k25")
"""Families whose models keep some tensors in float32 where the others are in bfloat16"""
TRAINERS = {
    "": None,
    "four ranks": ParallelConfig(tensor=2, expert=2),
    "experts on four ranks": ParallelConfig(context=2, expert=4),
    "stages": ParallelConfig(pipeline=2),
    "stages of two ranks": ParallelConfig(pipeline=2, expert=2),
}
"""Layouts of the trainer by what makes them special"""
NUM_RANKS = {"four ranks": 4, "experts on four ranks": 4, "stages of two ranks": 4}
QUICK = [("qwen3_moe", 2, 2, 1), ("qwen3_next", 2, 1, 2)]

CASES = [
    *((*layout, Precision.fp32, "") for layout in ENGINE_LAYOUTS),
    *((*layout, Precision.bf16, "") for layout in ENGINE_LAYOUTS if layout[0] in WITH_FLOAT32 and layout[1] > 1),
    *(
        (family, *layout, Precision.fp32, trainer)
        for family, layout in [("qwen3_moe", (4, 2, 2)), ("deepseek_v3", (2, 2, 1))]
        for trainer in TRAINERS
        if trainer
    ),
]
"""(family, tensor, expert, groups, precision, layout of the trainer)"""


def send_second(
    rank: int,
    world_size: int,
    port: int,
    paths: list[Path],
    engine: tuple[str, int],
    parallel: ParallelConfig,
    precision: Precision,
) -> tuple[ResyncReport | None, dict[str, int], list[dict[str, Any]]]:
    """Give an engine that has the first checkpoint the weights of the second.

    Returns:
        On rank 0 the report, the bytes of an element of each tensor, and what each rank of the engine keeps.
    """
    sender = WeightSender(rank, world_size, port, paths[0], parallel, precision, timeout_s=TIMEOUT_S)
    sender.load(paths[1])
    url, num_ranks = engine
    control = SglangControl("engine 0", url, timeout_s=TIMEOUT_S, num_ranks=num_ranks, key=KEY)
    session = ResyncSession(sender.source, [control], CONFIG, rank=rank, run_id="test-p2p")
    report = session.run(1)
    sizes = tensor_bytes(sender.source)
    kept = kept_bytes(control, sizes) if rank == 0 else []
    session.close()
    control.close()
    sender.close()
    return report, sizes, kept


def round_to_bf16(path: Path) -> None:
    """Give a checkpoint values that bfloat16 has, but for the biases of routers, which trainers keep in float32.
    Engines keep some more tensors in float32, which they would load unrounded and get from the trainer rounded."""
    for file in path.glob("*.safetensors"):
        tensors = {
            name: value if name.endswith("e_score_correction_bias") else value.bfloat16().float()
            for name, value in load_file(file).items()
        }
        save_file(tensors, file, metadata={"format": "pt"})


def behaviour(url: str, groups: int) -> list[tuple[torch.Tensor, list[int]]]:
    """Log-probs of a prompt, and what each group of the engine's ranks says greedily after it."""
    return [(engine_logprobs(url, TIMEOUT_S, group=group), engine_tokens(url, group=group)) for group in range(groups)]


@pytest.mark.parametrize(
    ("family", "tensor", "expert", "groups", "precision", "trainer"),
    [
        pytest.param(*case, marks=() if case[:4] in QUICK and case[4:] == (Precision.fp32, "") else pytest.mark.full)
        for case in CASES
    ],
)
def test_what_an_engine_was_sent_is_what_sglang_loads_and_it_computes_what_transformers_does(
    tmp_path, family, tensor, expert, groups, precision, trainer
):
    paths = [tmp_path / name for name in "ab"]
    for seed, path in enumerate(paths):
        write_toy(family, path, SIZE, seed)
        if precision is Precision.bf16:
            round_to_bf16(path)
    parallel = TRAINERS[trainer] or (
        ParallelConfig(expert=2) if num_experts(read_hf_config(paths[0])) else ParallelConfig(tensor=2)
    )
    num_ranks = NUM_RANKS.get(trainer, 2)
    rollout = RolloutConfig(
        engine_tp=tensor, engine_ep=expert, engine_attention_dp=groups, max_trajectory_tokens=128,
        sglang={"max_total_tokens": 4096},
    )  # fmt: skip
    server = EngineServer(0, rollout, paths[0], tmp_path / "engine.log", precision=precision, key=KEY)
    try:
        server.wait_ready()
        engine = (server.url, tensor)
        (report, sizes, kept), *_ = run_ranks(send_second, num_ranks, paths, engine, parallel, precision, timeout_s=250)
        sent = behaviour(server.url, groups)
        control = SglangControl("engine 0", server.url, timeout_s=TIMEOUT_S, num_ranks=tensor, key=KEY)
        prints = control.fingerprints(list(sizes))
        control.load_checkpoint(str(paths[1]))
        assert control.fingerprints(list(sizes)) == prints
        loaded = behaviour(server.url, groups)
        control.close()
    finally:
        server.stop()

    assert report.mismatching == ()
    assert report.failed_engines == {}
    assert report.verified_tensors == len(sizes)
    assert list(report.received_per_rank["engine 0"]) == kept
    assert sum(report.sent_per_rank) == report.bytes
    if parallel.pipeline == 1:
        share = report.bytes / num_ranks
        assert all(abs(each - share) < 0.1 * share for each in report.sent_per_rank)

    if precision is Precision.fp32:
        expected_T, expected = transformers_logprobs(paths[1]), transformers_tokens(paths[1])
        for logprobs_T, tokens in sent:
            assert (logprobs_T - expected_T).abs().max() < 2e-5
            assert tokens == expected
    for (logprobs_T, tokens), (expected_T, expected) in zip(sent, loaded, strict=True):
        assert (logprobs_T - expected_T).abs().max() < 2e-5
        assert tokens == expected
