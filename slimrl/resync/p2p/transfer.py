"""The `p2p` transport: every trainer rank sends what it holds straight to the engine ranks that keep it.

Once for a set of engines:

1. Each engine says what its ranks keep. Where trainer ranks hold it is known, so the plan follows (engine_plan.py).
2. Each engine's ranks and the trainer ranks that send to it form a group (peer_group.py).

Then for each version, after the pause:

3. The scales of quantised tensors are settled (sent_values.py).
4. Rank 0 tells every engine to receive; each trainer rank sends to each engine in a thread of its own (sender.py). So
   an engine that hangs or dies concerns its own group alone.
5. All ranks learn which engines failed. Those that live get the version again, the others have it already.
"""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from slimrl import device
from slimrl.checkpoints.safetensors_file import spec_bytes
from slimrl.config.schema.resync import PauseMode
from slimrl.data.boxes import box_of, elements
from slimrl.data.engine import EngineError
from slimrl.data.model_weights import (
    EngineControl,
    EngineModel,
    GroupSpec,
    Place,
    SourcePiece,
    TensorSpec,
    WeightSource,
    piece_of,
)
from slimrl.resync.buckets import rows_of
from slimrl.resync.engine_calls import EngineCalls, EnginesFailed, SendThread, fan_out
from slimrl.resync.expected_fingerprints import ExpectedFingerprints
from slimrl.resync.p2p.demand import Kept, sent_tensors, tiles_of
from slimrl.resync.p2p.engine_plan import EnginePlan, EnginePlans
from slimrl.resync.p2p.open_files import allow_connections
from slimrl.resync.p2p.peer_group import GroupError, serve_store
from slimrl.resync.p2p.sender import EngineSender
from slimrl.resync.p2p.sent_values import SentValues
from slimrl.resync.ranks import RankError, Ranks, StartAgain, sync_errors_across_ranks
from slimrl.resync.report import Clock
from slimrl.resync.transfer import Progress, SyncErrors, Transfer
from slimrl.resync.transform import Quantize

ENDS_S = 5.0
"""Seconds that a thread has to end, after its own deadline."""


class PeerTransfer(Transfer):
    """Implements Transfer.

    Args:
        ranks: of the trainer.
        address: of rank 0 as the engines and the other ranks reach it.
        run_id: part of the groups' names.
        timeout_s: deadline of each attempt at a version.
        bucket_bytes: most bytes that a rank holds beside its weights.
        pause: what running requests do.
    """

    def __init__(
        self,
        source: WeightSource,
        ranks: Ranks,
        engines: Sequence[EngineControl],
        *,
        address: str,
        run_id: str,
        timeout_s: float,
        bucket_bytes: int,
        pause: PauseMode,
        transform: Quantize | None,
    ) -> None:
        self._source, self._ranks, self._transform = source, ranks, transform
        self._address, self._run_id, self._timeout_s, self._bucket_bytes = address, run_id, timeout_s, bucket_bytes
        self._pause = pause
        self._layout = source.layout()
        self._tensors = sent_tensors(self._layout, transform)
        self._values = SentValues(source, self._tensors, transform, ranks)
        self._engines = list(engines)
        self._kept: dict[str, str] = {}
        """Digest of what each engine keeps, on rank 0"""
        self._news: dict[str, Mapping[EngineModel, Sequence[Kept]]] = {}
        """What an engine has said, by digest, and only rank 0 knows so far"""
        self._reports: dict[str, Mapping[EngineModel, Sequence[Kept]]] = {}
        self._planned: list[tuple[str, str]] | None = None
        self._plans: EnginePlans | None = None
        self._own: dict[str, EnginePlan] = {}
        self._groups: dict[str, GroupSpec] = {}
        self._senders: dict[str, EngineSender] = {}
        self._store: Any = None
        self._received: dict[str, tuple[int, ...]] = {}
        self._sent: Counter[str] = Counter()

    def use(self, engines: Sequence[EngineControl]) -> None:
        before = {engine.name: engine for engine in self._engines}
        self._engines = list(engines)
        for engine in self._engines:
            if before.get(engine.name) is not engine:
                self._kept.pop(engine.name, None)
                self._leave(engine.name)
        for name in before.keys() - {engine.name for engine in self._engines}:
            self._kept.pop(name, None)
            self._leave(name)

    def mine(self) -> list[EngineControl]:
        return self._engines if self._ranks.rank == 0 else []

    @property
    def sent_bytes(self) -> int:
        return sum(spec_bytes(tensor.spec) for tensor in self._tensors)

    @property
    def parts(self) -> int:
        return max((sum(map(len, plan.rounds.values())) for plan in self._own.values()), default=0)

    @property
    def nbytes(self) -> int:
        return sum(sender.nbytes for sender in self._senders.values())

    @property
    def sent_by_rank(self) -> int:
        return self._sent.total()

    @property
    def received(self) -> Mapping[str, tuple[int, ...]]:
        return self._received

    def run(
        self,
        version: int,
        calls: EngineCalls,
        clock: Clock,
        expected: ExpectedFingerprints,
        on_progress: Progress | None,
    ) -> None:
        self._sent.clear()
        self._received.clear()
        loaded: set[str] = set()
        ended: set[str] = set()

        def sync_errors(place: str, error: Exception | None) -> None:
            sync_errors_across_ranks(self._ranks, calls, version, place, error)

        while True:
            try:
                with clock("pause"):
                    self._together(sync_errors, "before the first message", partial(self._prepare, calls, loaded))
                    # Apart, since the other ranks wait no longer than two calls may take.
                    self._together(sync_errors, "before the first message", partial(self._ask, calls, loaded))
                    names = self._ranks.from_first([e.name for e in calls.engines if e.name not in loaded])
                    if names:
                        self._connect(sync_errors, calls, names)
                if names:
                    with clock("transform"):
                        self._together(sync_errors, "quantising", self._values.settle)
                    with clock("send"), _named("while it was sent"):
                        failures, error = self._send(version, calls, names)
                    loaded |= set(names) - failures.keys()
                    if on_progress is not None:
                        on_progress(len(loaded), len(self._engines))
                    sync_errors("while it was sent", error)
                with clock("activate"):
                    self._together(sync_errors, "after the last message", partial(_end, calls, ended))
                with clock("hash"):
                    self._record(expected)
                return
            except StartAgain:
                continue

    def close(self) -> None:
        for name in list(self._groups):
            self._leave(name)
        self._store = None

    def _together(self, sync_errors: SyncErrors, place: str, action: Callable[[], None]) -> None:
        """Run an action; all ranks learn how it ended on each."""
        error: Exception | None = None
        with _named(place):
            try:
                action()
            except (EngineError, OSError, ValueError) as raised:
                error = raised
            sync_errors(place, error)

    def _prepare(self, calls: EngineCalls, loaded: Collection[str]) -> None:
        """Pause the engines and open an update of those that have not loaded the version."""
        calls.each("pause", lambda engine: engine.pause(self._pause))
        due = {engine.name: engine for engine in calls.engines if engine.name not in loaded}
        fan_out({name: engine.begin_update for name, engine in due.items()}, "begin_update", self._timeout_s)

    def _ask(self, calls: EngineCalls, loaded: Collection[str]) -> None:
        """Ask the engines that are new what they keep."""
        models = [EngineModel.target]
        if any(tensor.spec.mtp for tensor in self._tensors):
            models.append(EngineModel.draft)
        new = {e.name: e for e in calls.engines if e.name not in loaded and e.name not in self._kept}

        def ask(engine: EngineControl) -> dict[EngineModel, Sequence[Kept]]:
            return {model: engine.kept(model) for model in models}

        answers = fan_out({name: partial(ask, e) for name, e in new.items()}, "kept", self._timeout_s)
        for name, kept in answers.items():
            digest = self._kept[name] = _digest(kept)
            if digest not in self._reports:
                self._news[digest] = kept

    def _connect(self, sync_errors: SyncErrors, calls: EngineCalls, names: Sequence[str]) -> None:
        """Plan what these engines get and form the groups that are missing."""
        self._together(sync_errors, "planning what each rank sends", partial(self._plan, names))
        self._leave_broken_chains(names)
        self._together(sync_errors, "before the first message", partial(self._join, calls, names))
        self._share_groups(names)

    def _plan(self, names: Sequence[str]) -> None:
        """Make the plan anew if these are other engines than before. All ranks have the same."""
        known = {name: self._kept[name] for name in names if name in self._kept}
        digests: dict[str, str] = self._ranks.from_first(known)
        self._reports |= self._ranks.from_first(self._news)
        self._news = {}
        # Also their order counts: a plan names an engine by its index.
        planned = list(digests.items())
        if planned == self._planned:
            return
        for name in list(self._groups):
            self._leave(name)
        self._planned, self._own = None, {}
        engines = [self._reports[digest] for digest in digests.values()]
        self._plans = EnginePlans(self._tensors, engines, num_ranks=self._ranks.size, bucket_bytes=self._bucket_bytes)
        # Only rank 0 needs the messages of others, once, to give them to the engine.
        self._own = {name: self._plans.of(index).sent_by(self._ranks.rank) for index, name in enumerate(digests)}
        allow_connections(sum(plan.world_size for plan in self._own.values() if plan.is_sent_by(self._ranks.rank)))
        self._planned = planned

    def _leave_broken_chains(self, names: Sequence[str]) -> None:
        """Leave all groups of engines that feed each other where one of them is missing."""
        heads: dict[str, str] = {}
        for name in names:
            feeder = self._own[name].feeder
            heads[name] = name if feeder is None else heads[names[feeder]]
        broken = {heads[name] for name in names if name not in self._groups}
        for name in names:
            if heads[name] in broken:
                self._leave(name)

    def _join(self, calls: EngineCalls, names: Sequence[str]) -> None:
        """Form the groups that are missing, as rank 0, and send their plans to the engines."""
        if self._ranks.rank != 0:
            return
        assert self._plans is not None, "no plan"
        engines = {engine.name: engine for engine in calls.engines}
        missing = [name for name in names if name not in self._groups]
        if missing and self._store is None:
            self._store = serve_store(self._address, self._timeout_s)
        for name in missing:
            self._groups[name] = GroupSpec(
                name=f"slimrl-{self._run_id}-{uuid4().hex[:12]}",
                address=self._address,
                port=self._store.port,
                world_size=self._own[name].world_size,
                backend=device.collective_backend(),
                timeout_s=self._timeout_s,
            )
        fed = self._fed_groups(names)
        joins = {
            name: partial(
                engines[name].join_group,
                self._groups[name],
                self._plans.of(index).rounds_by_rank(),
                fed.get(name),
            )
            for index, name in enumerate(names)
            if name in missing
        }
        try:
            fan_out(joins, "join_group", self._timeout_s)
        except EnginesFailed:
            for name in missing:
                del self._groups[name]
            raise

    def _fed_groups(self, names: Sequence[str]) -> dict[str, GroupSpec]:
        """The group of the engine that each engine feeds. The further down a chain, the shorter its deadline: an engine
        gives up on the next one before the one that feeds it gives up on it."""
        groups: dict[str, GroupSpec] = {}
        levels: dict[str, int] = {}
        for name in names:
            feeder = self._own[name].feeder
            levels[name] = 0 if feeder is None else levels[names[feeder]] + 1
            if feeder is not None:
                groups[names[feeder]] = replace(self._groups[name], timeout_s=self._timeout_s / levels[name])
        return groups

    def _share_groups(self, names: Sequence[str]) -> None:
        """Learn the groups from rank 0, and make this rank's senders."""
        self._groups = self._ranks.from_first(self._groups)
        for name in names:
            plan = self._own[name]
            if name not in self._senders and plan.is_sent_by(self._ranks.rank):
                self._senders[name] = EngineSender(plan, self._ranks.rank, self._groups[name])

    def _send(self, version: int, calls: EngineCalls, names: Sequence[str]) -> tuple[dict[str, str], Exception | None]:
        """(causes of the engines that failed, on all ranks; error of this rank)."""
        threads: list[tuple[str, SendThread]] = []
        for engine in calls.engines:
            if engine.name in names:
                threads.append((engine.name, SendThread(partial(self._receive, engine, version))))
        for name in names:
            if name in self._senders:
                send = partial(self._senders[name].send, version, self._values, self._timeout_s)
                threads.append((name, SendThread(send)))
        deadline = time.monotonic() + self._timeout_s + ENDS_S
        failures: dict[str, str] = {}
        error: Exception | None = None
        for name, thread in threads:
            raised = thread.wait(max(0.0, deadline - time.monotonic()))
            if isinstance(raised, EngineError | GroupError):
                # An engine that refused a message says why; the senders only notice.
                reason = str(raised)
                failures.setdefault(name, reason if reason.startswith(name) else f"{name}: {reason}")
            elif raised is not None:
                error = error or raised
        self._sent.update({name: self._senders[name].sent_bytes for name in names if name in self._senders})
        everywhere: dict[str, str] = {}
        for each in self._ranks.gather_objects(failures):
            everywhere = each | everywhere
        for name in everywhere:
            self._leave(name)
        if error is None and everywhere and self._ranks.rank == 0:
            error = EnginesFailed(everywhere)
        return everywhere, error

    def _receive(self, engine: EngineControl, version: int) -> None:
        group = self._groups[engine.name].name
        counts = [engine.receive(group, model, version) for model in self._own[engine.name].rounds]
        self._received[engine.name] = tuple(sum(each) for each in zip(*counts, strict=True))

    def _leave(self, name: str) -> None:
        self._groups.pop(name, None)
        if (sender := self._senders.pop(name, None)) is not None:
            sender.close()

    def _record(self, expected: ExpectedFingerprints) -> None:
        """Hash what quantisation makes of the pieces; the holders of a tensor's pieces take turns."""
        if self._transform is None:
            return
        for spec in expected.changed:
            for number, piece in enumerate(self._layout[spec]):
                if piece.holders[number % len(piece.holders)] == self._ranks.rank:
                    self._record_piece(expected, spec, piece)

    def _record_piece(self, expected: ExpectedFingerprints, spec: TensorSpec, piece: SourcePiece) -> None:
        assert self._transform is not None
        value = piece_of(self._source.groups(spec.name), piece).to(getattr(torch, spec.dtype))
        box = box_of(piece.region)
        results: list[tuple[Place, Tensor]] = []
        for number, out in enumerate(self._transform.sent_specs(spec)):
            part = tiles_of(box, self._transform.block) if number else box
            if elements(part):
                shape = [stop - start for start, stop in part]
                made = torch.empty(shape, dtype=getattr(torch, out.dtype), device=value.device)
                self._values.write(out.name, part, made)
                results.append(((rows_of(out), tuple(slice(*edge) for edge in part)), made))
        expected.record((rows_of(spec), piece.region), value, results)


@contextmanager
def _named(place: str) -> Iterator[None]:
    """Say in a RankError where the ranks were."""
    try:
        yield
    except RankError as error:
        raise RankError(f"{place}: {error}") from error


def _end(calls: EngineCalls, ended: set[str]) -> None:
    """End the update of the engines that have not ended it yet."""

    def end(engine: EngineControl) -> None:
        engine.end_update()
        ended.add(engine.name)

    due = {engine.name: partial(end, engine) for engine in calls.engines if engine.name not in ended}
    fan_out(due, "end_update", calls.timeout_s)


def _digest(kept: Mapping[EngineModel, Sequence[Kept]]) -> str:
    text = json.dumps({model.value: ranks for model, ranks in kept.items()}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
