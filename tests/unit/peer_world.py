"""Trainer ranks and engines of the p2p transport, whose ranks are threads of the test's process with real groups."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import torch
from engine_ranks import ThreadRank
from thread_meeting import Meeting

from slimrl.data.boxes import Box, rows
from slimrl.data.model_weights import EngineModel, GroupSpec, SourcePiece, TensorSpec
from slimrl.engines.plugin.kept_tensors import KeptRegion
from slimrl.engines.plugin.peer_receiver import PeerReceiver
from slimrl.resync.p2p.demand import sent_tensors
from slimrl.resync.p2p.engine_plan import EnginePlan, EnginePlans
from slimrl.resync.p2p.sender import EngineSender
from slimrl.resync.p2p.sent_values import SentValues

Pieces = Mapping[TensorSpec, Sequence[tuple[Box, tuple[int, ...]]]]
"""Regions of each tensor, and the trainer ranks that hold them"""

PADDING = -77.0
"""Value of a parameter's elements that belong to no tensor"""


def edges_of(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*edge) for edge in box)


class PieceSource:
    """Implements WeightSource: what one trainer rank holds of whole tensors, its pieces of one below each other.

    Args:
        live_dtype: of the weights that it holds; None for that of the tensors.
    """

    def __init__(self, rank: int, pieces: Pieces, truth: Mapping[str, torch.Tensor], live_dtype: Any = None) -> None:
        self._rank, self._pieces, self.truth, self._live_dtype = rank, pieces, truth, live_dtype

    def layout(self) -> dict[TensorSpec, tuple[SourcePiece, ...]]:
        layout = {}
        for spec, pieces in self._pieces.items():
            above: dict[int, int] = {}
            result = []
            for box, holders in pieces:
                result.append(SourcePiece(region=edges_of(box), holders=holders, first_row=above.get(holders[0], 0)))
                above |= {rank: above.get(rank, 0) + rows(box) for rank in holders}
            layout[spec] = tuple(result)
        return layout

    def groups(self, name: str) -> torch.Tensor:
        (spec,) = [spec for spec in self._pieces if spec.name == name]
        held = [self.truth[name][edges_of(box)] for box, holders in self._pieces[spec] if self._rank in holders]
        whole = torch.cat([value if value.ndim else value[None] for value in held])
        return whole.to(self._live_dtype or whole.dtype)[None]


@dataclass
class Parameter:
    """Where a rank of an engine keeps a region."""

    box: Box
    dtype: torch.dtype
    padding: int = 0
    """Elements behind each dimension"""


class PeerEngine:
    """The ranks of an engine, two on each node, and their parameters.

    Args:
        parameters: of each rank, by the tensor's name.
        drafts: names of the tensors that its draft model keeps.
    """

    def __init__(self, parameters: Sequence[Mapping[str, Sequence[Parameter]]], drafts: Sequence[str] = ()) -> None:
        meeting = Meeting(len(parameters))
        self.ranks = [ThreadRank(rank, meeting) for rank in range(len(parameters))]
        self.drafts = drafts
        self.regions: list[dict[str, list[KeptRegion]]] = [
            {name: [_region(one) for one in each] for name, each in of_rank.items()} for of_rank in parameters
        ]
        self.kept = {
            model: [
                {
                    name: [region.box for region in each]
                    for name, each in of_rank.items()
                    if (name in drafts) is (model is EngineModel.draft)
                }
                for of_rank in self.regions
            ]
            for model in (EngineModel.target, *([EngineModel.draft] if drafts else []))
        }
        self.receivers: list[PeerReceiver] = []

    def join(self, spec: GroupSpec, plan: EnginePlan, fed: GroupSpec | None = None) -> None:
        self.leave()
        self.receivers = [
            PeerReceiver(spec, rank, {model.value: messages for model, messages in rounds.items()}, fed)
            for rank, rounds in zip(self.ranks, plan.rounds_by_rank(), strict=True)
        ]

    def leave(self) -> None:
        for receiver in self.receivers:
            receiver.close()

    def clear(self) -> None:
        for of_rank in self.regions:
            for region in (region for each in of_rank.values() for region in each):
                region.memory.fill_(PADDING)

    def wrong(self, truth: Mapping[str, torch.Tensor]) -> list[tuple[int, str]]:
        """(rank, tensor) of all parameters that do not hold the truth, or whose padding is not as it was."""
        found = []
        for rank, of_rank in enumerate(self.regions):
            for name, regions in of_rank.items():
                for box, memory in regions:
                    expected = torch.full_like(memory, PADDING)
                    expected[tuple(slice(0, b - a) for a, b in box)] = truth[name][edges_of(box)].to(memory.dtype)
                    if not torch.equal(memory, expected):
                        found.append((rank, name))
        return found


def _region(one: Parameter) -> KeptRegion:
    shape = [b - a + one.padding for a, b in one.box]
    return KeptRegion(one.box, torch.full(shape, PADDING, dtype=one.dtype))


class World:
    """A trainer and its engines. The first engine of a chain gets versions from the trainer.

    Args:
        engines: those of one kind have the same parameters.
    """

    def __init__(
        self,
        pieces: Pieces,
        truth: Mapping[str, torch.Tensor],
        engines: Sequence[PeerEngine],
        *,
        num_ranks: int,
        bucket_bytes: int,
        timeout_s: float = 20.0,
        backend: str = "gloo",
    ) -> None:
        self.timeout_s, self.engines, self.backend = timeout_s, engines, backend
        self.sources = [PieceSource(rank, pieces, truth) for rank in range(num_ranks)]
        self.tensors = sent_tensors(self.sources[0].layout(), None)
        self.values = [
            SentValues(source, self.tensors, None, SimpleNamespace(rank=rank))
            for rank, source in enumerate(self.sources)
        ]
        kept = engines[0].kept
        plans = EnginePlans(self.tensors, [kept] * len(engines), num_ranks=num_ranks, bucket_bytes=bucket_bytes)
        self.plans = [plans.of(index) for index in range(len(engines))]
        self.groups: list[GroupSpec] = []
        self.senders: list[list[EngineSender]] = []
        self.join()

    def join(self) -> None:
        """Give every engine a new group."""
        self.leave()
        self.groups = [
            GroupSpec(
                name=f"test-{uuid4().hex}", address="127.0.0.1", port=1, world_size=plan.world_size,
                backend=self.backend, timeout_s=self.timeout_s,
            )
            for plan in self.plans
        ]  # fmt: skip
        fed = {plan.feeder: group for plan, group in zip(self.plans, self.groups, strict=True)}
        self.senders = [
            [EngineSender(plan, rank, group) for rank in plan.sources if plan.is_sent_by(rank)]
            for plan, group in zip(self.plans, self.groups, strict=True)
        ]
        for index, (engine, plan, group) in enumerate(zip(self.engines, self.plans, self.groups, strict=True)):
            engine.join(group, plan, fed.get(index))

    def leave(self) -> None:
        for sender in (sender for each in self.senders for sender in each):
            sender.close()
        for engine in self.engines:
            engine.leave()

    def receive(self, index: int, rank: int, version: int) -> list[int]:
        """What one rank of an engine does for a version; the bytes that it got for each model."""
        engine = self.engines[index]
        counts = []
        for model in engine.kept:
            engine.receivers[rank].receive(model.value, version, engine.regions[rank])
            counts.append(engine.receivers[rank].received_bytes)
        return counts

    def calls(self, version: int, send_s: float | None = None) -> dict[tuple[str, int, int], Callable[[], Any]]:
        """What each rank has to do for a version, by ("engine", engine, rank) and ("trainer", engine, sender)."""
        calls: dict[tuple[str, int, int], Callable[[], Any]] = {}
        for values in self.values:
            values.settle()
        for index, engine in enumerate(self.engines):
            for rank in range(len(engine.ranks)):
                calls["engine", index, rank] = lambda index=index, rank=rank: self.receive(index, rank, version)
            for sender in self.senders[index]:
                calls["trainer", index, sender._rank] = lambda sender=sender: sender.send(
                    version, self.values[sender._rank], send_s or self.timeout_s
                )
        return calls


@dataclass
class Outcome:
    values: dict[Any, Any]
    errors: dict[Any, Exception]
    seconds: float


def all_at_once(calls: Mapping[Any, Callable[[], Any]], within_s: float = 30.0) -> Outcome:
    """Run each call in a thread; what they returned or raised."""
    start = time.monotonic()
    outcome = Outcome({}, {}, 0.0)
    with ThreadPoolExecutor(len(calls)) as pool:
        futures: dict[Any, Future[Any]] = {key: pool.submit(call) for key, call in calls.items()}
        for key, future in futures.items():
            error = future.exception(max(0.0, start + within_s - time.monotonic()))
            if error is None:
                outcome.values[key] = future.result()
            else:
                outcome.errors[key] = error
    outcome.seconds = time.monotonic() - start
    return outcome
