"""What the stages know of each other: an episode of its engine, resync of its source and its engines.

trainer, rollout, resync and agent do not import each other; runtime hands them the real ones.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from slimrl.config.schema import PauseMode

if TYPE_CHECKING:
    # The weight maps import this module, and to check a recipe by them should not take the time that numpy takes.
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
    routed_experts: "np.ndarray | None"
    """int16 [len(input_ids) + len(tokens) - 1, layers, topk], or None where not asked for"""
    cached_tokens: int
    """Prompt tokens that the engine had in its prefix cache."""
    num_retries: int = 0
    """Attempts that failed before the one that was answered."""


class EngineError(Exception):
    """The engine did not answer a request: refused, died, or outran its deadline."""


class Engine(Protocol):
    def open(self, session_ids: Sequence[str], *, at_once: int) -> None:
        """Announce sessions before the first of them asks. They come in this order, at most `at_once` at a time."""
        ...

    def close(self, session_id: str) -> None:
        """The session asks no more."""
        ...

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
class TensorPart:
    """A tensor, or some of its rows, within a bucket."""

    spec: TensorSpec
    """Of the whole tensor."""
    start: int
    stop: int
    """Rows along dimension 0, the second excluded; a scalar has one row."""
    offset: int
    """Byte offset in the bucket, aligned to the element size."""
    nbytes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the part."""
        return (self.stop - self.start, *self.spec.shape[1:]) if self.spec.shape else ()

    @property
    def is_whole(self) -> bool:
        return self.stop - self.start == num_rows(self.spec)


def num_rows(spec: TensorSpec) -> int:
    """Size of dimension 0; 1 of a scalar."""
    return spec.shape[0] if spec.shape else 1


@dataclass(frozen=True, kw_only=True)
class BucketSpec:
    """Tensors, or parts of them, that travel together, packed one after the other in one flat buffer."""

    parts: tuple[TensorPart, ...]
    nbytes: int


Region = tuple[slice, ...]
"""A block of a tensor: one slice per dimension, with a start and a stop and no step."""


@dataclass(frozen=True, kw_only=True)
class SourcePiece:
    """A block of a Hugging Face tensor that some trainer ranks hold."""

    region: Region
    holders: tuple[int, ...]
    """Their ranks, ascending."""


@dataclass(frozen=True, kw_only=True)
class SourceTensor:
    """Where a Hugging Face tensor lies in the trainer."""

    spec: TensorSpec
    pieces: tuple[SourcePiece, ...]
    """They do not overlap and cover the tensor; a rank holds at most one of them."""


@dataclass(frozen=True, kw_only=True)
class EnginePlace:
    """What the planner of a resync knows of an engine."""

    name: str
    nodes: tuple[str, ...]
    """Names of the nodes on which its processes run."""
    num_ranks: int = 1
    """Its processes: the tensor-parallel size."""
    expert: int = 1
    """Its expert-parallel size."""


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """Broadcast groups of the engines' receivers with each source, a trainer's rank, which is rank 0 of its group."""

    name: str
    """Never used twice."""
    address: str
    port: int
    """At which the store of source 0, the sender, tells the members of each other."""
    world_size: int
    """A source and the receivers"""
    backend: str
    """nccl or gloo"""
    bucket_bytes: int
    """Of the largest bucket that will come."""
    timeout_s: float
    """Deadline of joining, and of one broadcast."""
    num_sources: int = 1


class WeightSource(Protocol):
    """The trainer's side of a resync; every rank of the trainer holds one."""

    def specs(self) -> list[TensorSpec]:
        """All tensors in the order in which `tensors` yields them; equal on every rank."""
        ...

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """(name, torch tensor) on rank 0; (name, None) on the others, which take part in the gathering."""
        ...

    def layout(self) -> list[SourceTensor]:
        """Where each tensor lies, in the order of `specs`; equal on every rank."""
        ...

    def piece(self, name: str) -> Any:
        """This rank's piece of a tensor as it is now: a torch tensor of the piece's shape, without padding.

        In the live weight's dtype, which may not be that of the spec, and a view of it where the layout allows.

        Raises:
            KeyError: this rank holds no piece of it.
        """
        ...

    def groups(self, name: str) -> Any:
        """The same without a copy: a view of the live weight whose first two dimensions are the piece's rows.

        A torch tensor [groups, rows of a group, ...]; padding may follow at the end of a dimension.

        Raises:
            KeyError: this rank holds no piece of it.
        """
        ...


class EngineControl(Protocol):
    """Control of one engine while its weights change. Each call has the deadline its maker was given.

    Every method raises EngineError naming the engine and the call.
    """

    @property
    def name(self) -> str: ...

    @property
    def num_ranks(self) -> int:
        """Processes of the engine (its tensor-parallel size)."""
        ...

    @property
    def place(self) -> EnginePlace: ...

    def probe(self, timeout_s: float) -> None:
        """Returns if the engine answers within `timeout_s`."""
        ...

    def pause(self, mode: PauseMode) -> None:
        """Stop scheduling; `mode` says what becomes of running requests."""
        ...

    def running_requests(self) -> int:
        """Requests under way that hold keys and values."""
        ...

    def begin_update(self) -> None:
        """Open an update; one that was left open is closed first."""
        ...

    def load_shared_bucket(self, segment: str, bucket: BucketSpec) -> None:
        """Load the bucket that lies in the named shared-memory segment (CPU) or behind the CUDA IPC handle."""
        ...

    def open_receivers(self, group: GroupSpec, first_rank: int) -> None:
        """Have a process on each of the engine's nodes receive the buckets of a version, in an open update.

        Returns at once; one that is not in the group joins it by and by.

        Args:
            first_rank: in the group, of the first of them.
        """
        ...

    def load_received(self, group: str, number: int, bucket: BucketSpec) -> None:
        """Load bucket `number`, from 0, of the version; it has been broadcast."""
        ...

    def leave_group(self, group: str) -> None: ...

    def load_version(self, folder: str, local_dir: str | None) -> None:
        """Load the version that lies in a folder; needs no update to be open.

        Args:
            local_dir: of the copy on the engine's node that is brought to the version and loaded in its place; None to
                load the folder itself, a whole version then.
        """
        ...

    def end_update(self) -> None: ...

    def flush_cache(self) -> None: ...

    def set_version(self, version: int) -> None: ...

    def resume(self) -> None: ...

    def fingerprints(self, names: list[str] | None) -> dict[str, str]:
        """Hash of loaded weights by Hugging Face tensor name; None means all."""
        ...
