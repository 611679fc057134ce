"""A resync reaches an engine's draft model, and its drafts are accepted from then on.

Every layer of the model adds nothing, so the next token depends on the last one alone. A layer for multi-token
prediction that passes on the token it reads then proposes what the model samples at a low temperature; one that
passes on its negative proposes the least likely tokens.
"""

import asyncio
from pathlib import Path

import pytest
import torch
from cpu_drafts import plugin_folder
from engine_probes import KEY
from machine import choose, on_gpu
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from sending_rank import TIMEOUT_S, send_with_drafts
from slimrl_tools.toy.toy import ToySize, write_toy

from slimrl.config.schema.precision import Precision
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.config.schema.speculative import DraftMode, SpeculativeConfig
from slimrl.data.engine import GenerateRequest
from slimrl.engines.client import SglangEngine
from slimrl.engines.servers.server import EngineServer

pytestmark = pytest.mark.timeout(600)

SIZE = choose(
    ToySize(layers=2, hidden=1024, head_dim=128, moe_intermediate=256, init_std=0.03, mtp_layers=1),
    ToySize(layers=2, mtp_layers=1),
)
REQUESTS, NUM_TOKENS, TEMPERATURE = 16, 64, 0.01


def write_chain(path: Path, sign: float) -> None:
    """A toy whose layer for multi-token prediction passes on the embedding times `sign`."""
    write_toy("deepseek_v3", path, SIZE, 0)
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.zero_()
            elif name.endswith("eh_proj.weight"):
                identity = torch.eye(len(tensor), dtype=tensor.dtype)
                tensors[name] = torch.cat([sign * identity, torch.zeros_like(identity)], dim=1)
        save_file(tensors, file, {"format": "pt"})


async def accepted_fraction(url: str) -> float:
    engine = SglangEngine(url, key=KEY)
    requests = [
        GenerateRequest(
            session_id=f"sample {number}", input_ids=[5, 7 * number + 3], temperature=TEMPERATURE, top_p=1.0, top_k=-1,
            max_new_tokens=NUM_TOKENS, stop_token_ids=(), timeout_s=TIMEOUT_S,
        )
        for number in range(REQUESTS)
    ]  # fmt: skip
    answers = await asyncio.gather(*map(engine.generate, requests))
    await engine.aclose()
    proposed, accepted = (
        sum(answer.counts[f"num_{kind}draft_tokens"] for answer in answers) for kind in ("", "accepted_")
    )
    return accepted / proposed


@pytest.mark.proves("a resync of the layer for multi-token prediction reaches the draft model, whose drafts it changes")
def test_drafts_follow_a_resync(tmp_path, figure):
    for name, sign in (("wrong", -1.0), ("right", 1.0)):
        write_chain(tmp_path / name, sign)
    rollout = RolloutConfig(
        max_trajectory_tokens=128, startup_timeout_s=200, max_concurrency_per_engine=REQUESTS,
        speculative=SpeculativeConfig(mode=DraftMode.mtp),
        # Without a GPU the draft model is loaded, and drafts nothing.
        env={} if on_gpu() else {"PYTHONPATH": plugin_folder(tmp_path / "plugin")},
        sglang={"max_total_tokens": 16384, "mem_fraction_static": 0.3} if on_gpu() else {"max_total_tokens": 16384},
    )  # fmt: skip
    server = EngineServer(
        0, rollout, tmp_path / "wrong", tmp_path / "engine.log", precision=Precision.bf16, cuda=on_gpu(), key=KEY
    )
    try:
        server.wait_ready()
        fractions = [asyncio.run(accepted_fraction(server.url))] if on_gpu() else []
        (mismatching,) = run_ranks(send_with_drafts, 1, server.url, tmp_path / "right", timeout_s=150)
        fractions += [asyncio.run(accepted_fraction(server.url))] if on_gpu() else []
    finally:
        server.stop()
    assert mismatching == ()
    if on_gpu():
        before, after = fractions
        assert before < 0.1
        assert after > 0.9
        figure(f"accepted fraction {before:.2f} before the resync, {after:.2f} after it")
