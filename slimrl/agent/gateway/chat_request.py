"""What a client asks of the policy, whichever API it speaks, and what it is answered."""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from slimrl.agent.chat.chat_format import ChatFormat
from slimrl.agent.environment import Message
from slimrl.agent.gateway.history import SampledTurn
from slimrl.agent.gateway.messages import history_key
from slimrl.config.schema.rollout import SamplingConfig

NEUTRAL: tuple[Any, ...] = (0, {}, [])
"""Values of sampling settings that change nothing."""


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    messages: Sequence[Message]
    """The messages in canonical form (messages.py)"""
    tools: Sequence[dict[str, Any]] = ()
    """JSON schemas of the tools that the policy is shown"""
    n: int = 1
    max_tokens: int | None = None
    """Largest number of new tokens that the client asks for; it can only lower the run's limit"""
    stop: tuple[str, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The client's sampling settings, by the names of its API"""
    has_instructions: bool = False
    """Whether the first message is an instruction that a request which goes on from this one's answer does not take
    over"""
    ignored: Mapping[str, str] = field(default_factory=dict)
    """Reasons why fields of the body are ignored, by the fields' paths"""
    num_bytes: int = 0
    """Size of the request's body"""
    model: str = ""
    """Name of the model, as the client gives it"""
    role: str = ""
    """Role that asks, in an agent of several; empty in others"""

    @cached_property
    def key(self) -> bytes:
        """Key of the request's history; see `history_key`"""
        return history_key(self.tools, self.messages, self.role)

    def overridden(self, run: SamplingConfig) -> list[str]:
        """Names of the client's settings that the run's replace."""
        own = {"temperature": run.temperature, "top_p": run.top_p, "top_k": run.top_k}
        replaced = [
            name
            for name, value in self.sampling.items()
            if (value != own[name] if name in own else isinstance(value, bool) or value not in NEUTRAL)
        ]
        more = self.max_tokens is not None and self.max_tokens > run.max_new_tokens
        return [*replaced, *(["max_tokens"] if more else [])]


@dataclass(eq=False, kw_only=True)
class Reply:
    """The answer to a request: the turns that the policy sampled."""

    turns: Sequence[SampledTurn]
    chat: ChatFormat
    sampling: Mapping[str, Any]
    """The run's sampling settings, which were used"""
    overridden: Sequence[str]
    """Names of the client's settings that were not used"""
    has_instructions: bool = False
    """Whether the request's first message is an instruction; see ChatRequest"""
    is_kept: bool = True
    """Whether its turns are part of the trajectory"""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.turns[0].tokens) - len(self.turns[0].sampled)

    @property
    def num_sampled_tokens(self) -> int:
        return sum(len(turn.sampled) for turn in self.turns)

    @property
    def num_cached_tokens(self) -> int:
        return self.turns[0].results[0].cached_tokens

    @property
    def note(self) -> dict[str, Any]:
        """The field `slimrl` of every answer."""
        return {"sampling": dict(self.sampling), "overridden": list(self.overridden)}


def token_logprobs(turn: SampledTurn, chat: ChatFormat) -> list[dict[str, Any]]:
    """Each sampled token with its log-prob, in OpenAI's form; the token that ended the turn included."""
    listed = []
    for result in turn.results:
        for token, logprob in zip(result.tokens, result.logprobs, strict=True):
            text = chat.template.decode([token])
            listed.append(
                {"token": text, "token_id": token, "logprob": logprob, "bytes": [*text.encode()], "top_logprobs": []}
            )
    return listed
