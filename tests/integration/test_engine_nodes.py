"""An engine whose ranks are on two nodes, here two servers on this machine that know each other by an address alone."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file
from slimrl_tools.toy.toy import ToySize, write_toy
from test_engine_ranks import PROMPT, TIMEOUT_S, engine_logprobs
from transformers import AutoModelForCausalLM

from slimrl.config.schema import Precision, RolloutConfig
from slimrl.models.fingerprint import fingerprint
from slimrl.rollout.servers.control import EngineMemory, SglangControl
from slimrl.rollout.servers.ports import free_port
from slimrl.rollout.servers.process import ServerError
from slimrl.rollout.servers.server import EnginePart, EngineServer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

ENDS_WITHIN_S = 30.0


def keep_checking(server: EngineServer) -> None:
    deadline = time.monotonic() + ENDS_WITHIN_S
    while time.monotonic() < deadline:
        server.check()
        time.sleep(0.2)


def test_an_engine_over_two_nodes_computes_names_its_weights_and_ends_with_either_part(tmp_path):
    path = tmp_path / "model"
    write_toy("qwen3_moe", path, ToySize(init_std=0.1), seed=0)
    rollout = RolloutConfig(engine_tp=2, engine_nodes=2, max_trajectory_tokens=128, max_concurrency_per_engine=8)
    meeting = f"127.0.0.1:{free_port()}"
    parts = [
        EngineServer(
            0, rollout, path, tmp_path / f"part_{number}.log", precision=Precision.fp32,
            part=EnginePart(number=number, meeting=meeting),
        )
        for number in (0, 1)
    ]  # fmt: skip
    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(EngineServer.wait_ready, parts))
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        with torch.no_grad():
            expected_T = model(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)
        expected_T = expected_T.gather(-1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
        assert (engine_logprobs(parts[0].url, len(PROMPT)) - expected_T).abs().max() < 2e-5
        control = SglangControl("engine 0", parts[0].url, timeout_s=TIMEOUT_S, num_ranks=2, nodes=("a", "b"))
        prints = control.fingerprints(None)
        tensors = {name: value for file in path.glob("*.safetensors") for name, value in load_file(file).items()}
        assert {name: prints.get(name) for name in tensors} == {name: fingerprint(tensors[name]) for name in tensors}
        control.release_memory(list(EngineMemory))
        control.resume_memory(list(EngineMemory))
        control.resume()
        # What is left notices, without a request, that the other part is gone.
        parts[1].stop()
        with pytest.raises(ServerError):
            keep_checking(parts[0])
    finally:
        for part in parts:
            part.stop()
