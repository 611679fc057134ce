"""What the stages know of each other: an episode of its engine, resync of its source and its engines.

trainer, rollout, resync and agent do not import each other; runtime hands them the real ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """One assistant turn asked of an engine."""

    session_id: str
    """The trajectory; requests of one session go to one engine, which then reuses the prefix."""
    input_ids: list[int]
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    timeout_s: float
    seed: int | None = None
    """Seed of this request's sampling; None leaves it to the engine."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GenerateResult:
    """Tokens exactly as the engine sampled them, the stop token included."""

    tokens: list[int]
    logprobs: list[float]
    weight_version: int
    finish_reason: Literal["stop", "length", "abort"]
    routed_experts: np.ndarray | None
    """int16 [len(input_ids) + len(tokens) - 1, layers, topk], or None where not asked for"""
    cached_tokens: int
    """Prompt tokens that the engine had in its prefix cache."""


class EngineError(Exception):
    """The engine did not answer a request: refused, died, or outran its deadline."""


class Engine(Protocol):
    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Raises EngineError."""
        ...

    async def aclose(self) -> None:
        """Let go of connections; on the event loop that used it."""
        ...


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Name, shape and dtype of one tensor in Hugging Face terms."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As torch prints it without the prefix: float32, bfloat16."""
    atomic: str | None = None
    """Neighbouring tensors of one such name reach an engine in one bucket, because it fuses them."""


@dataclass(frozen=True, kw_only=True)
class BucketSpec:
    """Tensors that travel together, packed one after the other in one flat buffer."""

    tensors: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]
    """Byte offset of each tensor, aligned to its element size."""
    nbytes: int


class WeightSource(Protocol):
    """The trainer's side of a resync; every rank of the trainer holds one and all are iterated together."""

    def specs(self) -> list[TensorSpec]:
        """All tensors in the order in which `tensors` yields them; equal on every rank."""
        ...

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """(name, torch tensor) on rank 0; (name, None) on the others, which take part in the gathering."""
        ...


class EngineControl(Protocol):
    """Control of one engine while its weights change. Each call has the deadline its maker was given.

    Every method raises EngineError naming the engine and the call.
    """

    @property
    def name(self) -> str: ...

    @property
    def num_ranks(self) -> int:
        """Processes of the engine (its tensor-parallel size); each joins a broadcast group."""
        ...

    def pause(self) -> None:
        """Stop scheduling; running requests are put back into the queue."""
        ...

    def begin_update(self) -> None: ...

    def load_shared_bucket(self, segment: str, bucket: BucketSpec) -> None:
        """Load the bucket that lies in the named shared-memory segment (CPU) or behind the CUDA IPC handle."""
        ...

    def join_group(self, address: str, port: int, rank: int, world_size: int, group: str, backend: str) -> None:
        """Join the broadcast group of the `collective` transport; returns once all members have joined."""
        ...

    def leave_group(self, group: str) -> None: ...

    def receive_bucket(self, group: str, bucket: BucketSpec) -> None:
        """Receive the bucket by broadcast from rank 0 and load it; returns when both are done."""
        ...

    def end_update(self) -> None: ...

    def flush_cache(self) -> None: ...

    def set_version(self, version: int) -> None: ...

    def resume(self) -> None: ...

    def fingerprints(self, names: list[str] | None) -> dict[str, str]:
        """Hash of loaded weights by Hugging Face tensor name; None means all."""
        ...
