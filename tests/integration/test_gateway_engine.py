"""The gateway in front of a real SGLang engine: its tokens and log-probs, texts that end a turn, abandoned requests."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from engine_probes import KEY
from fleet import Fleet
from gateway_agents import play, trained
from slimrl_tools.toy.toy import ToySize, write_toy
from transformers import AutoModelForCausalLM

from slimrl.agent.gateway.connection import Connection
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.rollout import RolloutConfig, SamplingConfig
from slimrl.data.trajectory import Status
from slimrl.engines.client import SglangEngine
from slimrl.engines.servers.control import SglangControl

pytestmark = [pytest.mark.integration, pytest.mark.timeout(280)]

ROLLOUT = RolloutConfig(num_engines=1, max_trajectory_tokens=512, startup_timeout_s=200)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gateway") / "toy"
    write_toy("qwen3_moe", path, ToySize(init_std=0.1), seed=0)
    return path


async def test_a_trajectory_has_the_engines_tokens_and_log_probs(model: Path, tmp_path: Path):
    async def agent(line: Any, connection: Connection) -> None:
        client = openai.AsyncOpenAI(base_url=connection.openai_base_url, api_key=connection.api_key)
        create = client.chat.completions.create
        messages: list[Any] = list(line["messages"])
        for _ in range(2):
            answer = await create(model="policy", messages=messages, logprobs=True, max_tokens=12)
            told.append(answer.choices[0].logprobs.content)
            messages += [answer.choices[0].message, {"role": "user", "content": "And 7?"}]
        letters = [letter for letter in "aeiou 123"]
        answer = await create(model="policy", messages=messages, stop=letters[:4], logprobs=True)
        told.append(answer.choices[0].logprobs.content)
        stopped.append(answer.choices[0])
        body = json.dumps({"model": "policy", "messages": line["messages"]})
        headers = {"authorization": f"Bearer {connection.api_key}"}
        async with httpx.AsyncClient(headers=headers, trust_env=False) as impatient:
            with pytest.raises(httpx.ReadTimeout):
                await impatient.post(f"{connection.openai_base_url}/chat/completions", content=body, timeout=0.5)
        async with asyncio.timeout(10):
            while control.running_requests():
                await asyncio.sleep(0.1)

    told: list[Any] = []
    stopped: list[Any] = []
    with Fleet(ROLLOUT, model, tmp_path, precision=Precision.fp32) as fleet:
        control = SglangControl("engine 0", fleet.engine_urls[0], timeout_s=60, key=KEY)
        engine = SglangEngine(fleet.engine_urls[0], key=KEY)
        # Without stop tokens a turn is as long as it may be.
        sampling = SamplingConfig(max_new_tokens=300, ignore_end_of_turn=True)
        trajectory = await play(engine, agent, sampling=sampling, max_trajectory_tokens=512, trajectory_timeout_s=100.0)
        await engine.aclose()
    assert trajectory.status is Status.completed, trajectory.metadata
    assert trajectory.metadata["num_turns"] == 3
    assert trajectory.metadata["gateway"]["abandoned"] == 1
    sampled = [token for tokens, _ in trained(trajectory) for token in tokens]
    logprobs = [value for _, values in trained(trajectory) for value in values]
    assert sampled == [one.token_id for turn in told for one in turn]
    assert logprobs == [pytest.approx(one.logprob, abs=1e-6) for turn in told for one in turn]
    assert stopped[0].finish_reason == "stop"
    assert not set("aeio") & set(stopped[0].message.content)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for segment in trajectory.segments:
        with torch.no_grad():
            logits = reference(torch.tensor(segment.tokens.astype("int64"))[None]).logits[0, :-1]
        chosen = logits.log_softmax(-1).gather(-1, torch.tensor(segment.tokens[1:].astype("int64"))[:, None])[:, 0]
        mask = torch.tensor(segment.loss_mask[1:])
        assert (chosen - torch.tensor(segment.rollout_logprobs[1:]))[mask].abs().max() <= 5e-6
