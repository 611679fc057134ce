"""A gateway in front of a scripted engine, and what its tests ask it."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from slimrl_tools.toy.toy_tokenizer import build_tokenizer

from slimrl.agent.chat.chat_format import ChatFormat
from slimrl.agent.chat.template import ChatTemplate
from slimrl.agent.dialogue import Dialogues
from slimrl.agent.gateway.agents import Agent, FunctionAgent
from slimrl.agent.gateway.connection import Connection
from slimrl.agent.gateway.runner import GatewayRunner
from slimrl.agent.parsers import NoCalls, make_parser
from slimrl.config.schema.agent import AgentConfig, GatewayConfig, HistoryMode
from slimrl.config.schema.rollout import RolloutConfig, SamplingConfig
from slimrl.data.engine import EngineError, GenerateRequest, GenerateResult
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Trajectory

TOKENIZER = build_tokenizer()
CHAT = ChatFormat(ChatTemplate(TOKENIZER), [TOKENIZER.eos_token_id])
PROMPT = Prompt(
    prompt_id="p:1", messages=[{"role": "user", "content": "Compute 34*17+2."}], label=580, metadata={"level": 2}
)
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "34*17+2"}}\n</tool_call>'
ANSWER = "34*17+2 = \\boxed{580}.<|im_end|>"
PARAMETERS = {
    "type": "object",
    "properties": {"expression": {"type": "string", "description": "Arithmetic."}},
    "required": ["expression"],
}
TOOL = {
    "type": "function",
    "function": {"name": "calculator", "description": "Evaluate arithmetic.", "parameters": PARAMETERS},
}


def encode(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False).input_ids


def decode(tokens: Any) -> str:
    return TOKENIZER.decode(list(tokens), skip_special_tokens=False)


@dataclass
class ScriptedEngine:
    """Answers requests by turns from a list, or as a function of the request's text says; keeps what it sampled."""

    script: list[Any] | Callable[[str], str]
    requests: list[GenerateRequest] = field(default_factory=list)
    sampled: list[tuple[list[int], list[int], list[float]]] = field(default_factory=list)
    """(context, tokens, log-probs) of each answer"""
    cancelled: int = 0
    under_way: int = 0
    most_under_way: int = 0

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        number = len(self.requests)
        self.requests.append(request)
        entry = self.script(decode(request.input_ids)) if callable(self.script) else self.script.pop(0)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            if isinstance(entry, float):
                await asyncio.sleep(entry)
                entry = self.script.pop(0)
            else:
                await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.under_way -= 1
        if isinstance(entry, EngineError):
            raise entry
        tokens = encode(entry) if isinstance(entry, str) else list(entry)
        finish = "stop"
        if len(tokens) > request.max_new_tokens:
            tokens, finish = tokens[: request.max_new_tokens], "length"
        logprobs = [-number - position / 128 for position in range(len(tokens))]
        self.sampled.append((list(request.input_ids), tokens, logprobs))
        return GenerateResult(
            tokens=tokens,
            logprobs=logprobs,
            weight_versions=np.full(len(tokens), 7, np.int32),
            finish_reason=finish,
            routed_experts=None,
            cached_tokens=0,
        )


def parser_of(schemas: Any) -> Any:
    return make_parser("qwen25", schemas) if schemas else NoCalls()


parser_of([TOOL])  # its first import takes seconds, for which a client would not wait


def runner_of(
    engine: Any, agent: Agent, *, gateway: dict[str, Any] | None = None, one_at_a_time: bool = False, **limits: Any
) -> GatewayRunner:
    history = limits.pop("history", HistoryMode.keep)
    rollout = RolloutConfig(**{"max_trajectory_tokens": 512, "max_turns": 32, "trajectory_timeout_s": 20.0, **limits})
    return GatewayRunner(
        engine=engine,
        dialogues=Dialogues(CHAT, parser_of, stop_at_call=rollout.stop_at_tool_call),
        agent=agent,
        rollout=rollout,
        config=AgentConfig(function="a:agent", gateway=GatewayConfig(**gateway or {}), history=history),
        one_at_a_time=one_at_a_time,
    )


async def play(
    engine: Any,
    agent: Agent | Callable[[Any, Connection], Awaitable[Any]],
    *,
    sampling: SamplingConfig | None = None,
    seed: int = 11,
    **settings: Any,
) -> Trajectory:
    """The trajectory of an agent, which may be a function."""
    if callable(agent):
        agent = FunctionAgent(function=agent, path="a:agent")
    runner = runner_of(engine, agent, **settings)
    await runner.start()
    try:
        sampling = sampling or SamplingConfig(max_new_tokens=64)
        return await runner.run(PROMPT, trajectory_id="t:1", sampling=sampling, seed=seed)
    finally:
        await runner.stop()


def trained(trajectory: Trajectory) -> list[tuple[list[int], list[float]]]:
    """(tokens, log-probs) that each segment trains."""
    return [
        (one.tokens[one.loss_mask].tolist(), one.rollout_logprobs[one.loss_mask].tolist())
        for one in trajectory.segments
    ]


def assert_every_sample_is_trained_once(trajectory: Trajectory, engine: ScriptedEngine) -> None:
    """The segments' sampled tokens are the engine's, each after the context that the engine had."""
    found = []
    for segment in trajectory.segments:
        for turn in sorted(set(segment.turn_ids[segment.loss_mask].tolist())):
            (places,) = ((segment.turn_ids == turn) & segment.loss_mask).nonzero()
            first, last = int(places[0]), int(places[-1]) + 1
            assert last - first == len(places)
            logprobs = segment.rollout_logprobs[first:last].tolist()
            found.append((segment.tokens[:first].tolist(), segment.tokens[first:last].tolist(), logprobs))
    assert sorted(found) == sorted(engine.sampled)
