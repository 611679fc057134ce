"""An engine without a model: it answers after a latency drawn as an engine's would be (a prefill, then tokens at the
pace of a full batch), with a call of the calculator, and at the end with an answer."""

import asyncio
import random
from functools import partial

import numpy as np
from slimrl_tools.toy.toy_tokenizer import build_tokenizer

from slimrl.agent.chat.chat_format import ChatFormat
from slimrl.agent.chat.template import ChatTemplate
from slimrl.agent.dialogue import Dialogues
from slimrl.agent.parsers import make_parser
from slimrl.data.engine import Engine, GenerateRequest, GenerateResult

PREFILL_S, TOKEN_S, SPREAD = 0.3, 0.04, 0.3
"""Medians of the latency of a turn: a prefill and each token; and the standard deviation of the logarithm."""
CALL = 'First compute {0}.\n<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{0}"}}}}\n</tool_call>'
ANSWER = "The result is \\boxed{580}.<|im_end|>"
QUESTION, LABEL = "Compute 34*17+2 step by step.", 580
SYSTEM_PROMPT = "Put the answer in \\boxed{}."


def dialogues_of_policy() -> Dialogues:
    """Dialogues of a policy that calls tools as Qwen2.5 does."""
    tokenizer = build_tokenizer()
    chat = ChatFormat(ChatTemplate(tokenizer), [tokenizer.eos_token_id])
    return Dialogues(chat, partial(make_parser, "qwen25"), stop_at_call=True)


def turns_of(chat: ChatFormat, num_turns: int) -> list[list[int]]:
    """The tokens of an episode's turns."""
    texts = [CALL.format(f"34*17+{number}") for number in range(num_turns - 1)]
    return [chat.template.encode(text) for text in [*texts, ANSWER]]


class MadeUpEngine(Engine):
    """Gives every session the same turns.

    Args:
        turns: their tokens.
        latency_s: 1 for the latencies above, 0 for none.
        held_turn: all requests of this turn wait until `release` is set.
    """

    def __init__(self, turns: list[list[int]], *, latency_s: float = 1.0, held_turn: int = -1) -> None:
        self.turns, self._scale, self._held_turn = turns, latency_s, held_turn
        self._random = random.Random(0)
        self.release = asyncio.Event()
        self.num_held = self.num_turns = self.most_sessions = 0
        self.version = 1
        """Version of the weights"""
        self._turn_of: dict[str, int] = {}

    def close(self, session_id: str) -> None:
        self._turn_of.pop(session_id, None)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        number = self._turn_of.get(request.session_id, 0)
        self._turn_of[request.session_id] = number + 1
        self.most_sessions = max(self.most_sessions, len(self._turn_of))
        tokens = self.turns[number]
        if number == self._held_turn:
            self.num_held += 1
            await self.release.wait()
        median_s = PREFILL_S + TOKEN_S * len(tokens)
        await asyncio.sleep(self._scale * median_s * self._random.lognormvariate(0, SPREAD))
        self.num_turns += 1
        return GenerateResult(
            tokens=list(tokens),
            logprobs=[-0.5] * len(tokens),
            weight_versions=np.full(len(tokens), self.version, np.int32),
            finish_reason="stop",
            routed_experts=None,
            cached_tokens=0,
        )

    async def aclose(self) -> None:
        return
