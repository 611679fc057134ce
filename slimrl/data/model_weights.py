"""Types of weights between trainer and engines, and the protocols of both ends of a resync.

trainer, rollout and resync do not import each other; runtime passes them the implementations.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any, Protocol

from slimrl.config.schema.resync import PauseMode
from slimrl.data.boxes import Box
from slimrl.data.peer_messages import Placed, Round


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Name, shape and dtype of a Hugging Face tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Dtype as in torch, without the prefix: float32, bfloat16."""
    mtp: bool = False
    """Whether it belongs to a layer for multi-token prediction: engines hold it in their draft model."""


@dataclass(frozen=True, kw_only=True)
class TensorPart:
    """A tensor, or some of its rows, within a bucket."""

    spec: TensorSpec
    """Spec of the whole tensor."""
    start: int
    stop: int
    """End of the part's rows along dimension 0, excluded; a scalar has one row."""
    offset: int
    """Byte offset in the bucket, aligned to the element size; 0 before it is in one."""
    nbytes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        return (self.stop - self.start, *self.spec.shape[1:]) if self.spec.shape else ()

    @property
    def region(self) -> "Region":
        """All of the part, as a region of the whole tensor."""
        return (
            (slice(self.start, self.stop), *(slice(0, size) for size in self.spec.shape[1:])) if self.spec.shape else ()
        )

    def view(self, buffer: Any) -> Any:
        """The part as a tensor, a view of the bucket's memory: `buffer` is uint8 and begins with the bucket."""
        import torch

        flat = buffer[self.offset : self.offset + self.nbytes]
        return flat.view(getattr(torch, self.spec.dtype)).view(self.shape)

    def local(self, region: "Region") -> "Region":
        """A region of the whole tensor, counted from the part's first row."""
        return (slice(region[0].start - self.start, region[0].stop - self.start), *region[1:]) if region else ()

    def region_view(self, buffer: Any, region: "Region") -> Any:
        """A region of the whole tensor that lies in the part; see `view`."""
        return self.view(buffer)[self.local(region)]

    def region_bytes(self, region: "Region") -> int:
        return prod(edge.stop - edge.start for edge in region) * self.nbytes // max(1, prod(self.shape))


def num_rows(spec: TensorSpec) -> int:
    """Size of dimension 0; 1 for a scalar."""
    return spec.shape[0] if spec.shape else 1


def packed_bytes(parts: Sequence[TensorPart]) -> int:
    """Bytes of the parts of a bucket, which lie one after the other in one flat buffer."""
    return parts[-1].offset + parts[-1].nbytes if parts else 0


Region = tuple[slice, ...]
"""A block of a tensor: one slice per dimension, with a start and a stop and no step."""

Place = tuple[TensorPart, Region]
"""A part of a tensor, and a region of the tensor that lies in it."""


@dataclass(frozen=True, kw_only=True)
class SourcePiece:
    """A block of a Hugging Face tensor that some trainer ranks hold."""

    region: Region
    holders: tuple[int, ...]
    """Trainer ranks that hold the block, ascending."""
    first_row: int = 0
    """Index of the region's first row among the rows that a holder has of the tensor; above 0 if it has several
    pieces."""


SourceLayout = Mapping[TensorSpec, tuple[SourcePiece, ...]]
"""The blocks of each Hugging Face tensor and the trainer ranks that hold them, in export order.

The pieces of a tensor cover it without overlap. A rank holds at most one of them, or one of each section of rows if
sections are sharded one by one.
"""


class EngineModel(str, Enum):
    """A model that an engine serves with, by SGLang's name of its role."""

    target = "target"
    draft = "draft"
    """It holds the layers for multi-token prediction."""


@dataclass(frozen=True, kw_only=True)
class EnginePlace:
    """The nodes and ranks of an engine."""

    name: str
    nodes: tuple[str, ...]
    """Names of the nodes on which its processes run."""
    num_ranks: int = 1
    """Number of the engine's processes, its tensor-parallel size"""


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """The group of an engine's ranks, which are its first members, and of the trainer ranks that send to them."""

    name: str
    """Name of the group, unique in a run."""
    address: str
    port: int
    """Port of the TCPStore of trainer rank 0, through which the members find each other."""
    world_size: int
    backend: str
    """Backend of the group: nccl or gloo"""
    timeout_s: float
    """Deadline of a version, joining included."""


def piece_of(groups: Any, piece: SourcePiece) -> Any:
    """A piece in its own shape, without padding, of what WeightSource.groups gives; a view where the layout allows."""
    rows = groups.flatten(0, 1)[piece.first_row :]
    return rows[tuple(slice(0, edge.stop - edge.start) for edge in piece.region)] if piece.region else rows[0]


class WeightSource(Protocol):
    """The trainer's side of a resync; every rank of the trainer holds one."""

    def layout(self) -> SourceLayout:
        """All tensors; equal on every rank."""
        ...

    def groups(self, name: str) -> Any:
        """This rank's pieces of a tensor, as a view of the live weight where the layout allows: [groups, rows, ...].

        The first two dimensions together are the pieces' rows. Padding may follow at the end of a dimension. The dtype
        is the live weight's, which may differ from the spec's.

        Raises:
            KeyError: this rank holds no piece of it.
        """
        ...


class EngineControl(Protocol):
    """Control of one engine while its weights change. Each call has the deadline that the constructor was given.

    Every method raises EngineError, which names the engine and the call.
    """

    @property
    def name(self) -> str: ...

    @property
    def place(self) -> EnginePlace: ...

    def probe(self, timeout_s: float) -> None:
        """Returns if the engine answers within `timeout_s`."""
        ...

    def pause(self, mode: PauseMode) -> None:
        """Stop scheduling; `mode` decides what happens to running requests."""
        ...

    def running_requests(self) -> int:
        """Running requests that hold keys and values."""
        ...

    def begin_update(self) -> None:
        """Open an update; closes one that was left open."""
        ...

    def map_memory(
        self,
        segments: Mapping[int, Sequence[str]],
        rounds: Sequence[Mapping[EngineModel, Sequence[Sequence[Placed]]]],
    ) -> None:
        """Give each rank the plan of what lies where in the trainer's shared memory; it replaces an earlier one.

        Args:
            segments: names of files in /dev/shm (CPU) or CUDA IPC handles of the slots of each trainer rank, by its
                number.
            rounds: of each rank of the engine, by model, the messages that it loads in each round, whose source is the
                trainer rank in whose slot they lie.
        """
        ...

    def load_round(self, model: EngineModel, number: int, slot: int) -> None:
        """Load a round of one model out of the slots of this number; an update must be open."""
        ...

    def kept(self, model: EngineModel) -> list[dict[str, list[Box]]]:
        """The regions of each Hugging Face tensor that each rank of the engine keeps, by name."""
        ...

    def join_group(
        self, group: GroupSpec, rounds: Sequence[Mapping[EngineModel, Sequence[Round]]], fed: GroupSpec | None
    ) -> None:
        """Give each rank its messages. The ranks join the group when they first receive; they leave an earlier one.

        Args:
            rounds: of each rank of the engine, by model. The messages' source is the number of a member.
            fed: the group of an engine that this one feeds with what it gets.
        """
        ...

    def receive(self, group: str, model: EngineModel, version: int) -> list[int]:
        """Receive a version of one model through the group; an update must be open.

        Returns:
            The bytes that came to each rank from other processes.
        """
        ...

    def load_version(self, folder: str, local_dir: str | None) -> None:
        """Load the version in a folder; no update need be open.

        Args:
            local_dir: of the copy on the engine's node, which is updated to the version and loaded; None to load the
                folder itself, which must be a whole version.
        """
        ...

    def end_update(self) -> None: ...

    def flush_cache(self) -> None: ...

    def set_version(self, version: int) -> None: ...

    def resume(self) -> None: ...

    def fingerprints(self, names: list[str] | None) -> dict[str, str]:
        """Hashes of loaded weights by Hugging Face name; None means all."""
        ...

    def draft_fingerprints(self, names: list[str]) -> dict[str, str]:
        """Hashes of loaded weights of the engine's draft model, by Hugging Face name."""
        ...
