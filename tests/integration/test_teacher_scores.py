"""A real SGLang engine as a teacher: its scores are the model's log-probs, whatever else is asked of it."""

import asyncio
import json
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from engine_probes import KEY
from fleet import Fleet
from slimrl_tools.toy.toy import ToySize, write_toy
from slimrl_tools.toy.toy_tokenizer import build_tokenizer
from transformers import AutoModelForCausalLM

from slimrl.base.seeds import derive_seed
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.data.engine import EngineError, GenerateRequest, ScoreRequest
from slimrl.data.trajectory import Segment, Status, Trajectory
from slimrl.engines.client import SglangEngine
from slimrl.engines.engine_key import EngineKey
from slimrl.engines.teacher import Teacher
from slimrl.runtime.checks.teacher_check import why_no_teacher

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(240)]

ROLLOUT = RolloutConfig(max_trajectory_tokens=512, max_concurrency_per_engine=32, startup_timeout_s=200)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("teacher") / "toy"
    write_toy("qwen3_moe", path, ToySize(layers=2, hidden=64, moe_intermediate=64, init_std=0.1), seed=0)
    return path


@pytest.fixture(scope="module")
def url(model, tmp_path_factory):
    with Fleet(ROLLOUT, model, tmp_path_factory.mktemp("logs"), precision=Precision.fp32) as fleet:
        yield fleet.engine_urls[0]


@pytest.fixture
async def engine(url):
    client = SglangEngine(url, key=KEY)
    yield client
    await client.aclose()


def tokens_of(index: int, length: int) -> list[int]:
    return [3 + (17 * index + 7 * position) % 250 for position in range(length)]


def score_request(tokens: list[int], start: int = 1, timeout_s: float = 60.0) -> ScoreRequest:
    return ScoreRequest(session_id="s", tokens=tokens, start=start, timeout_s=timeout_s)


async def test_scores_are_the_log_probs_of_transformers_in_float64(engine, model):
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, experts_implementation="eager")
    # Prefixes in common with each other, of which the engine has the keys of the first requests cached.
    lengths, starts = (2, 33, 200, 511), (1, 17, 150, 199)
    asked = [
        (tokens_of(n % 2, length), start) for n, length in enumerate(lengths) for start in starts if start < length
    ]
    found = await asyncio.gather(*(engine.score(score_request(tokens, start)) for tokens, start in asked))
    worst = 0.0
    for (tokens, start), scores in zip(asked, found, strict=True):
        ids_T = torch.tensor(tokens)
        with torch.no_grad():
            logprobs_TV = reference(ids_T[None]).logits[0].log_softmax(-1)
        expected = logprobs_TV[start - 1 : -1].gather(-1, ids_T[start:, None])[:, 0].numpy()
        assert (scores.shape, scores.dtype) == ((len(tokens) - start,), np.float32)
        worst = max(worst, np.abs(scores - expected).max())
    assert worst <= 1e-4


async def test_scores_are_the_log_probs_with_which_the_engine_sampled(engine):
    async def one(index: int) -> float:
        prompt = tokens_of(index, 10 + index)
        result = await engine.generate(
            GenerateRequest(
                session_id=f"g{index}",
                input_ids=prompt,
                temperature=1.0,
                top_p=1.0,
                top_k=-1,
                max_new_tokens=60,
                stop_token_ids=(),
                timeout_s=60.0,
                seed=derive_seed(index),
            )
        )
        scores = await engine.score(score_request(prompt + result.tokens, len(prompt)))
        return np.abs(scores - np.array(result.logprobs)).max()

    assert max(await asyncio.gather(*map(one, range(8)))) <= 1e-5


async def test_a_trajectory_is_scored_where_the_policy_sampled_and_nowhere_else(engine):
    tokens = tokens_of(3, 40)
    mask = [position in (*range(10, 20), *range(25, 30)) for position in range(40)]
    segments = [Segment.not_sampled(tokens, mask), Segment.not_sampled(tokens[:5], [False] * 5)]
    trajectory = Trajectory(group_id="g", trajectory_id="t", segments=segments, status=Status.completed)
    await Teacher([engine], slots_per_engine=2, timeout_s=60.0).score(trajectory)
    whole = await engine.score(score_request(tokens))
    np.testing.assert_allclose(segments[0].teacher_logprobs, np.where(mask, [0, *whole], 0), atol=1e-5)
    assert segments[1].teacher_logprobs.tolist() == [0.0] * 5


async def test_what_the_engine_refuses_is_named(engine, url, model):
    with pytest.raises(EngineError, match=r"score of s: 400 .*context length"):
        await engine.score(score_request(tokens_of(0, 5000)))
    config = json.loads((model / "config.json").read_text())
    with pytest.raises(EngineError, match=r"outside of the vocabulary"):
        await SglangEngine(url, vocab_size=config["vocab_size"], key=KEY).score(
            score_request([1, config["vocab_size"]])
        )


def test_a_server_is_accepted_for_its_own_tokenizer_and_refused_for_others(url, model):
    tokenizer = build_tokenizer()
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    assert why_no_teacher(url, KEY, tokenizer, size) == ""
    assert "its vocabulary is smaller than the policy's" in why_no_teacher(url, KEY, tokenizer, size + 1)
    other = build_tokenizer()
    other.add_tokens(["Привет"])
    assert "has another tokenizer: a sample text is" in why_no_teacher(url, KEY, other, size)
    special = build_tokenizer()
    special.add_special_tokens({"additional_special_tokens": ["<|never_said|>"]})
    assert "and '' there" in why_no_teacher(url, KEY, special, size) or "has another" in why_no_teacher(
        url, KEY, special, size
    )
    assert "no teacher answers there: ConnectError" in why_no_teacher("http://127.0.0.1:9", KEY, tokenizer, size)
    assert why_no_teacher(url, None, tokenizer, size).startswith("asks for a key: name the environment variable")
    assert why_no_teacher(url, EngineKey("other"), tokenizer, size).startswith("refuses this key")
    # A teacher that is asked for nothing is left as it was.
    assert httpx.get(f"{url}/health").status_code == 200
