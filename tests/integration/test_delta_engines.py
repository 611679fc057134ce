"""Engines of Qwen3-Next and Qwen3.5 on a CPU: states that prefill, decode and the prefix cache hand on."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest
import torch
from engine_probes import KEY
from fleet import Fleet
from slimrl_tools.toy.toy import ToySize, write_toy
from small_models import CONFIGS, small_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from slimrl.base.seeds import derive_seed
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.resync import PauseMode
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.data.engine import GenerateRequest, GenerateResult
from slimrl.engines.client import SglangEngine
from slimrl.engines.lockstep import LockstepEngine
from slimrl.engines.servers.control import SglangControl
from slimrl.models.family import family_of

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(240)]

VOCAB = 300
"""More than the tokens of the toys' tokenizer."""
LAYERS, EXPERTS_PER_TOKEN = (CONFIGS["qwen3_next"][name] for name in ("num_hidden_layers", "num_experts_per_tok"))
CHUNK = 48
"""Tokens of a prefill: prompts are longer, so that a prefill continues from the state of the one before."""
ROLLOUT = RolloutConfig(
    max_trajectory_tokens=256,
    # A third as many requests run at once as have conversations, and their states do not all stay in the cache.
    max_concurrency_per_engine=6,
    routed_experts=True,
    startup_timeout_s=200,
    sglang={"chunked_prefill_size": CHUNK},
)
Turns = list[tuple[list[int], GenerateResult]]


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5_moe"])
def model(request, tmp_path_factory) -> Path:
    """No two of its sizes are equal, and no norm is trivial."""
    folder = tmp_path_factory.mktemp("delta")
    path = small_model(request.param, folder / "hf", vocab_size=VOCAB)
    config = json.loads((path / "config.json").read_text())
    # What SGLang reads, and transformers does not write.
    config |= {"full_attention_interval": 4, "rope_theta": config["rope_parameters"]["rope_theta"]}
    assert family_of(config).unserved(config) is None
    (path / "config.json").write_text(json.dumps(config))
    write_toy(request.param, folder / "toy", ToySize(layers=1, hidden=32), seed=0)
    for file in (folder / "toy").glob("*token*"):
        shutil.copy(file, path)
    return path


@pytest.fixture(scope="module")
def reference(model) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, experts_implementation="eager")


@pytest.fixture(scope="module")
def fleet(model, tmp_path_factory):
    with Fleet(ROLLOUT, model, tmp_path_factory.mktemp("logs"), precision=Precision.fp32) as fleet:
        yield fleet


@pytest.fixture
async def engine(fleet):
    client = SglangEngine(fleet.url, vocab_size=VOCAB, routed_experts_shape=(LAYERS, EXPERTS_PER_TOKEN), key=KEY)
    yield client
    await client.aclose()


def ask(session: str, tokens: list[int], new: int, turn: int = 0) -> GenerateRequest:
    return GenerateRequest(
        session_id=session, input_ids=tokens, temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=new,
        stop_token_ids=(), timeout_s=100.0, seed=derive_seed(session, turn),
    )  # fmt: skip


def prompt(index: int, length: int) -> list[int]:
    return [3 + (17 * index + 7 * position) % 250 for position in range(length)]


async def converse(engine, session: str, tokens: list[int], turns: int) -> Turns:
    """(context, answer) of each turn; three tokens come between two turns."""
    history = []
    for turn in range(turns):
        result = await engine.generate(ask(session, tokens, 10 + turn, turn))
        history.append((tokens, result))
        tokens = [*tokens, *result.tokens, 5, 6, 7]
    return history


@torch.no_grad()
def assert_equals(reference: PreTrainedModel, conversation: Turns) -> None:
    """All turns of a conversation; float32 alone makes errors of up to 1.5e-5 in this model, 5e-7 for most tokens."""
    context, result = conversation[-1]
    output = reference(torch.tensor([context + result.tokens]), output_router_logits=True)
    logprobs_TV = output.logits[0].log_softmax(-1)
    router_TLE = torch.stack(output.router_logits, 1).softmax(-1)
    highest_TLK = router_TLE.topk(EXPERTS_PER_TOKEN + 1)
    clear_TL = highest_TLK.values[..., -2] - highest_TLK.values[..., -1] > 1e-4
    assert clear_TL.double().mean() > 0.98
    chosen_TLK = highest_TLK.indices[..., :-1].sort(-1).values
    for context, result in conversation:
        end = len(context) + len(result.tokens) - 1
        expected = logprobs_TV[len(context) - 1 : end].gather(-1, torch.tensor(result.tokens)[:, None])[:, 0]
        errors = (expected - torch.tensor(result.logprobs)).abs()
        assert errors.max() < 5e-5
        assert errors.median() < 2e-6
        found_TLK = torch.from_numpy(result.routed_experts).long().sort(-1).values
        same_TL = (found_TLK == chosen_TLK[:end]).all(-1)
        assert (same_TL | ~clear_TL[:end]).all()


async def test_logprobs_and_routing_of_crowded_conversations_equal_transformers(engine, reference):
    conversations = await asyncio.gather(
        *(converse(engine, f"parity-{index}", prompt(index, 1 + 8 * index), 3) for index in range(18))
    )
    for conversation in conversations:
        assert_equals(reference, conversation)
    assert max(len(conversation[0][0]) for conversation in conversations) > 2 * CHUNK


async def test_a_later_turn_continues_from_the_state_of_the_one_before(engine, reference):
    turns = await converse(engine, "alone", prompt(30, 70), 3)
    assert_equals(reference, turns)
    # The state behind an answer is that behind its last token but one: the last one was not computed with.
    reached = [0] + [len(context) + len(result.tokens) - 1 for context, result in turns[:-1]]
    assert [result.cached_tokens for _, result in turns] == reached


async def test_two_requests_that_share_a_beginning_do_not_share_what_follows(engine, reference):
    first = await converse(engine, "first", prompt(40, 60), 1)
    context, result = first[0]
    begun = [*context, *result.tokens]
    others = await asyncio.gather(*(converse(engine, f"fork-{i}", [*begun, 20 + i, 9], 1) for i in range(3)))
    assert all(other[0][1].cached_tokens >= len(begun) - 1 for other in others)
    for conversation in others:
        assert_equals(reference, [*first, *conversation])


@pytest.mark.parametrize("mode", [PauseMode.retract, PauseMode.in_place])
async def test_a_paused_request_continues_with_its_state(engine, fleet, reference, mode):
    control = SglangControl("engine 0", fleet.engine_urls[0], timeout_s=60, key=KEY)
    tokens = prompt(50, 20)
    task = asyncio.create_task(engine.generate(ask(f"paused-{mode.value}", tokens, 200)))
    while not control.running_requests():
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.1)
    control.pause(mode)
    assert not task.done()
    if mode is PauseMode.retract:
        control.flush_cache()
    control.resume()
    result = await task
    assert len(result.tokens) == 200
    assert_equals(reference, [(tokens, result)])


async def test_lockstep_rollouts_repeat_bit_for_bit_from_an_empty_cache(fleet):
    control = SglangControl("engine 0", fleet.engine_urls[0], timeout_s=60, key=KEY)

    async def rollout() -> list[list[tuple[list[int], list[float]]]]:
        control.flush_cache()
        engine = LockstepEngine(
            [SglangEngine(fleet.engine_urls[0], routed_experts_shape=(LAYERS, EXPERTS_PER_TOKEN), key=KEY)]
        )
        sessions = [f"lock-{index}" for index in range(6)]
        engine.open(sessions, at_once=len(sessions))

        async def one(index: int) -> list[tuple[list[int], list[float]]]:
            try:
                turns = await converse(engine, sessions[index], prompt(index, 5 + 20 * index), 1 + index % 3)
            finally:
                engine.close(sessions[index])
            return [(result.tokens, result.logprobs) for _, result in turns]

        results = await asyncio.gather(*map(one, range(6)))
        await engine.aclose()
        return results

    assert await rollout() == await rollout()
