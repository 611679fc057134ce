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

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import uuid4

from slimrl import device
from slimrl.checkpoints.safetensors_file import spec_bytes
from slimrl.config.schema.resync import PauseMode
from slimrl.data.engine import EngineError
from slimrl.data.model_weights import (
    EngineControl,
    GroupSpec,
    WeightSource,
)
from slimrl.resync.engine_calls import EngineCalls, EnginesFailed, SendThread, fan_out
from slimrl.resync.expected_fingerprints import ExpectedFingerprints
from slimrl.resync.p2p.demand import sent_tensors
from slimrl.resync.p2p.engine_plan import EnginePlan, EnginePlans
from slimrl.resync.p2p.kept_reports import KeptReports
from slimrl.resync.p2p.open_files import allow_connections
from slimrl.resync.p2p.peer_group import GroupError, serve_store
from slimrl.resync.p2p.sender import EngineSender
from slimrl.resync.p2p.sent_values import SentValues
from slimrl.resync.ranks import Ranks, StartAgain, sync_errors_across_ranks
from slimrl.resync.report import Clock
from slimrl.resync.steps import named, together
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
        self._reports = KeptReports(self._tensors, ranks)
        self._planned: list[tuple[str, str]] | None = None
        self._plans: EnginePlans | None = None
        self._own: dict[str, EnginePlan] = {}
        self._groups: dict[str, GroupSpec] = {}
        self._senders: dict[str, EngineSender] = {}
        self._store: Any = None
        self._received: dict[str, tuple[int, ...]] = {}
        self._sent: Counter[str] = Counter()

    def use(self, engines: Sequence[EngineControl]) -> None:
        stayed = {engine.name for engine in engines if engine in self._engines}
        changed = {engine.name for engine in [*self._engines, *engines]} - stayed
        self._reports.forget(changed)
        for name in changed:
            self._leave(name)
        self._engines = list(engines)

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
                    together(sync_errors, "before the first message", partial(self._prepare, calls, loaded))
                    # Apart, since the other ranks wait no longer than two calls may take.
                    together(sync_errors, "before the first message", partial(self._ask, calls, loaded))
                    names = self._ranks.from_first([e.name for e in calls.engines if e.name not in loaded])
                    if names:
                        self._connect(sync_errors, calls, names)
                if names:
                    with clock("transform"):
                        together(sync_errors, "quantising", self._values.settle)
                    with clock("send"), named("while it was sent"):
                        failures, error = self._send(version, calls, names)
                    loaded |= set(names) - failures.keys()
                    if on_progress is not None:
                        on_progress(len(loaded), len(self._engines))
                    sync_errors("while it was sent", error)
                with clock("activate"):
                    together(sync_errors, "after the last message", partial(_end, calls, ended))
                with clock("hash"):
                    self._values.record(expected)
                return
            except StartAgain:
                continue

    def close(self) -> None:
        for name in list(self._groups):
            self._leave(name)
        self._store = None

    def _prepare(self, calls: EngineCalls, loaded: Collection[str]) -> None:
        """Pause the engines and open an update of those that have not loaded the version."""
        calls.each("pause", lambda engine: engine.pause(self._pause))
        due = {engine.name: engine for engine in calls.engines if engine.name not in loaded}
        fan_out({name: engine.begin_update for name, engine in due.items()}, "begin_update", self._timeout_s)

    def _ask(self, calls: EngineCalls, loaded: Collection[str]) -> None:
        """Ask the engines that are new what they keep."""
        self._reports.ask([engine for engine in calls.engines if engine.name not in loaded], self._timeout_s)

    def _connect(self, sync_errors: SyncErrors, calls: EngineCalls, names: Sequence[str]) -> None:
        """Plan what these engines get and form the groups that are missing."""
        together(sync_errors, "planning what each rank sends", partial(self._plan, names))
        self._leave_broken_chains(names)
        together(sync_errors, "before the first message", partial(self._join, calls, names))
        self._share_groups(names)

    def _plan(self, names: Sequence[str]) -> None:
        """Make the plan anew if these are other engines than before. All ranks have the same."""
        digests = self._reports.share()
        # Also their order counts: a plan names an engine by its index.
        planned = [(name, digests[name]) for name in names]
        if planned == self._planned:
            return
        for name in list(self._groups):
            self._leave(name)
        self._planned, self._own = None, {}
        engines = [self._reports.of(digest) for _, digest in planned]
        self._plans = EnginePlans(self._tensors, engines, num_ranks=self._ranks.size, bucket_bytes=self._bucket_bytes)
        # Only rank 0 needs the messages of others, once, to give them to the engine.
        self._own = {name: self._plans.of(index).sent_by(self._ranks.rank) for index, name in enumerate(names)}
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


def _end(calls: EngineCalls, ended: set[str]) -> None:
    """End the update of the engines that have not ended it yet."""

    def end(engine: EngineControl) -> None:
        engine.end_update()
        ended.add(engine.name)

    due = {engine.name: partial(end, engine) for engine in calls.engines if engine.name not in ended}
    fan_out(due, "end_update", calls.timeout_s)
