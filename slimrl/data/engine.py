"""The engine as an episode sees it. `agent` uses this protocol, `rollout` implements it; neither imports the other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

EVALUATION = "eval"
"""Beginning of the ids of evaluations' sessions"""
RUN_EVALUATION = f"{EVALUATION}_"
"""Beginning of those of evaluations within a training run"""


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """A request for one assistant turn."""

    session_id: str
    """The trajectory's id; requests of a session go to one engine where they can, which reuses the prefix."""
    input_ids: list[int]
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    timeout_s: float
    stop: tuple[str, ...] = ()
    """Texts at whose end the turn ends too; they are part of the sampled tokens."""
    seed: int | None = None
    """Seed of the request's sampling; None lets the engine choose."""
    experts_from: int = 0
    """First input token whose experts are asked for, where the engine reports experts; those before are known"""


@dataclass(frozen=True, kw_only=True, eq=False)
class GenerateResult:
    """Tokens exactly as the engine sampled them, the stop token included."""

    tokens: list[int]
    logprobs: list[float]
    weight_versions: np.ndarray
    """int32 [len(tokens)]: version of the weights that sampled each token"""
    finish_reason: Literal["stop", "length", "abort"]
    routed_experts: np.ndarray | None
    """int16 [len(input_ids) + len(tokens) - 1 - experts_from, layers, topk], or None if not requested"""
    cached_tokens: int
    """Prompt tokens that were in the engine's prefix cache."""
    num_retries: int = 0
    """Failed attempts before the one that succeeded."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Further counts, by their keys in a trajectory's metadata, which holds the sums over its requests: see
    trajectory.py."""


@dataclass(frozen=True, kw_only=True)
class ScoreRequest:
    """A request for the log-probs of given tokens."""

    session_id: str
    """Id of the session, which names the request in errors."""
    tokens: list[int]
    start: int
    """First token to score, at least 1: nothing comes before token 0 that it could follow."""
    timeout_s: float


class EngineError(Exception):
    """The engine refused a request, ended, or missed the deadline."""


class EngineUnreachable(EngineError):
    """The request did not reach the engine, or the connection broke before the answer: another engine may serve it."""


class EngineAbsent(EngineUnreachable):
    """The request did not reach the engine at all: nothing listens at its address."""


class Scorer(Protocol):
    """An engine that scores tokens instead of sampling them: a teacher."""

    async def score(self, request: ScoreRequest) -> np.ndarray:
        """float32 [len(tokens) - start]: natural log-prob, at temperature 1, of each token from `start` on, given all
        tokens before it.

        Raises:
            EngineError: the engine refused, ended, or did not answer before the deadline.
        """
        ...

    async def aclose(self) -> None:
        """Close the connections; call it on the event loop that used them."""
        ...


class Engine(Protocol):
    """An engine that samples turns. Only one that depends on which sessions are active has `open` and `close` of its
    own."""

    def open(self, session_ids: Sequence[str], *, at_once: int) -> None:
        """Announce sessions before their first request. They start in this order, at most `at_once` at a time."""
        return

    def close(self, session_id: str) -> None:
        """End a session."""
        return

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample one turn. Raises EngineError."""
        ...

    async def aclose(self) -> None:
        """Close the connections; call it on the event loop that used them."""
        ...
