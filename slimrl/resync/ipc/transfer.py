"""The `ipc` transport: engines load what they keep out of the memory of trainer ranks on their nodes.

Once for a set of engines:

1. Each engine says what its ranks keep. Trainer ranks on its nodes, its receivers, get that for it (receivers.py).
2. The plan is that of `p2p`: which rank sends which region to which receiver in which round (deliveries.py). One rank
   plans for each set of engines and tells the others their parts.
3. Receivers allocate their slots, and the engines are told what will lie where in them.

Then for each version, after the pause and the settling of scales, round by round: fill the slots (rank_rounds.py) and
have the engines load them, while the next round is filled. After a fault the version starts again for the engines that
can continue.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from slimrl.checkpoints.safetensors_file import spec_bytes
from slimrl.config.schema.resync import PauseMode
from slimrl.data.model_weights import EngineControl, EngineModel, WeightSource
from slimrl.resync.engine_calls import EngineCalls, fan_out
from slimrl.resync.expected_fingerprints import ExpectedFingerprints
from slimrl.resync.ipc.deliveries import Deliveries, Delivery, loads_of, rounds_of
from slimrl.resync.ipc.rank_rounds import RankRounds
from slimrl.resync.ipc.receivers import EngineSet, alike, engine_sets, kept_by_receiver
from slimrl.resync.p2p.demand import Kept, sent_tensors
from slimrl.resync.p2p.engine_plan import EnginePlans
from slimrl.resync.p2p.kept_reports import KeptReports
from slimrl.resync.p2p.sent_values import SentValues
from slimrl.resync.ranks import Ranks, StartAgain, sync_errors_across_ranks
from slimrl.resync.report import Clock
from slimrl.resync.steps import Pipelined, together
from slimrl.resync.transfer import Progress, SyncErrors, Transfer
from slimrl.resync.transform import Quantize

_Rounds = list[tuple[EngineModel, Deliveries]]
"""The rounds of a set of engines, with the model that each is for"""
_Planned = list[tuple[EngineSet, dict[str, str]]]
"""Sets of engines, and the digest of what each of their engines keeps"""


class IpcTransfer(Transfer):
    """Implements Transfer.

    Args:
        run_id: part of the names of shared memory.
        timeout_s: deadline of a call to the engines.
        deadline_s: of each wait for another rank.
        bucket_bytes: most bytes of a receiver's slots, and of the staging buffers of a rank that sends to other nodes.
        pause: what running requests do.

    Raises:
        ValueError: an engine is on a node without trainer ranks.
    """

    def __init__(
        self,
        source: WeightSource,
        ranks: Ranks,
        engines: Sequence[EngineControl],
        *,
        run_id: str,
        timeout_s: float,
        deadline_s: float,
        bucket_bytes: int,
        pause: PauseMode,
        transform: Quantize | None,
    ) -> None:
        self._ranks, self._run_id, self._pause = ranks, run_id, pause
        self._timeout_s, self._deadline_s, self._bucket_bytes = timeout_s, deadline_s, bucket_bytes
        self._tensors = sent_tensors(source.layout(), transform)
        self._values = SentValues(source, self._tensors, transform, ranks)
        self._reports = KeptReports(self._tensors, ranks)
        self._engines: list[EngineControl] = []
        self._planned: _Planned = []
        self._models: list[list[EngineModel]] = []
        """The model of each round of each set"""
        self._mapped: set[str] = set()
        """This rank's engines that have the plan"""
        self._rounds: RankRounds | None = None
        self.use(engines)

    def use(self, engines: Sequence[EngineControl]) -> None:
        engine_sets([engine.place for engine in engines], self._ranks.nodes)
        kept = {engine.name for engine in engines if engine in self._engines}
        gone = {engine.name for engine in [*self._engines, *engines]} - kept
        self._reports.forget(gone)
        self._mapped -= gone
        self._engines = list(engines)

    def mine(self) -> list[EngineControl]:
        sets = engine_sets([engine.place for engine in self._engines], self._ranks.nodes)
        names = {name for each in sets if each.leader == self._ranks.rank for name in each.receivers}
        return [engine for engine in self._engines if engine.name in names]

    @property
    def sent_bytes(self) -> int:
        return sum(spec_bytes(tensor.spec) for tensor in self._tensors)

    @property
    def parts(self) -> int:
        return max(map(len, self._models), default=0)

    @property
    def nbytes(self) -> int:
        return self._rounds.nbytes if self._rounds else 0

    @property
    def sent_by_rank(self) -> int:
        return self._rounds.sent_bytes if self._rounds else 0

    def run(
        self,
        version: int,
        calls: EngineCalls,
        clock: Clock,
        expected: ExpectedFingerprints,
        on_progress: Progress | None,
    ) -> None:
        def sync_errors(place: str, error: Exception | None) -> None:
            sync_errors_across_ranks(self._ranks, calls, version, place, error)

        while True:
            try:
                with clock("pause"):
                    together(sync_errors, "before the first message", partial(self._prepare, calls))
                    # Apart, since the other ranks wait no longer than two calls may take.
                    together(sync_errors, "before the first message", partial(self._ask, calls))
                    self._connect(sync_errors, calls)
                with clock("transform"):
                    together(sync_errors, "quantising", self._values.settle)
                if self._rounds is not None:
                    self._send(self._rounds, version, calls, sync_errors, clock, on_progress)
                with clock("activate"):
                    together(sync_errors, "after the last round", partial(_end, calls))
                with clock("hash"):
                    self._values.record(expected)
                return
            except StartAgain:
                continue

    def close(self) -> None:
        if self._rounds is not None:
            self._rounds.close()
        self._rounds, self._planned, self._models = None, [], []
        self._mapped.clear()

    def _prepare(self, calls: EngineCalls) -> None:
        calls.each("pause", lambda engine: engine.pause(self._pause))
        calls.each("begin_update", lambda engine: engine.begin_update())

    def _ask(self, calls: EngineCalls) -> None:
        self._reports.ask(calls.engines, self._timeout_s)

    def _connect(self, sync_errors: SyncErrors, calls: EngineCalls) -> None:
        """Plan anew if these are other engines than before, and give the plan to those that lack it."""
        digests = self._reports.share()
        sets = engine_sets([e.place for e in self._engines if e.name in digests], self._ranks.nodes)
        planned = [(each, {name: digests[name] for name in each.receivers}) for each in sets]
        own: dict[int, _Rounds] = {}
        if planned != self._planned:
            self.close()
            self._make_rounds(sync_errors, planned, own)
        together(sync_errors, "giving the engines their plan", partial(self._map, calls, own))

    def _make_rounds(self, sync_errors: SyncErrors, planned: _Planned, own: dict[int, _Rounds]) -> None:
        """Plan for this rank's sets of engines, into `own`; learn this rank's part of all sets and allocate for it."""
        led = [index for index, (engines, _) in enumerate(planned) if engines.leader == self._ranks.rank]

        def plan() -> None:
            own.update(self._rounds_of(planned, led))

        together(sync_errors, "planning what each rank sends", plan)
        models = {index: [model for model, _ in rounds] for index, rounds in own.items()}
        for each in self._ranks.gather_objects(models):
            models |= each
        mine: dict[int, list[Deliveries]] = {}
        for each in self._ranks.exchange_objects(_parts(own)).values():
            mine |= each
        count = range(len(planned))
        parts = [mine.get(index, [()] * len(models[index])) for index in count]
        self._rounds = RankRounds(parts, self._values, self._ranks, run_id=self._run_id, timeout_s=self._deadline_s)
        self._planned, self._models = planned, [models[index] for index in count]

    def _rounds_of(self, planned: _Planned, indices: Sequence[int]) -> dict[int, _Rounds]:
        """The rounds of some sets, by the set's index."""
        if not indices:
            return {}
        known: dict[tuple[object, ...], Mapping[EngineModel, Sequence[Kept]]] = {}
        for engines, digests in planned:
            if (key := alike(engines, digests)) not in known:
                reports = {name: self._reports.of(digest) for name, digest in digests.items()}
                known[key] = kept_by_receiver(engines, reports)
        plans = EnginePlans(
            self._tensors,
            [known[alike(*each)] for each in planned],
            num_ranks=None,
            bucket_bytes=self._bucket_bytes,
            chosen=[engines.nearest(self._ranks.nodes) for engines, _ in planned],
        )
        return {index: rounds_of(plans.of(index), planned[index][0], self._ranks.nodes) for index in indices}

    def _map(self, calls: EngineCalls, own: dict[int, _Rounds]) -> None:
        """Give the plan to this rank's engines that lack it.

        Args:
            own: rounds of this rank's sets, as far as they are known.
        """
        sets = {name: index for index, (engines, _) in enumerate(self._planned) for name in engines.receivers}
        lacking = [engine for engine in calls.engines if engine.name not in self._mapped]
        unknown = {sets[engine.name] for engine in lacking} - own.keys()
        own = own | self._rounds_of(self._planned, sorted(unknown))

        def give(engine: EngineControl) -> None:
            assert self._rounds is not None, "no slots"
            index = sets[engine.name]
            engines, digests = self._planned[index]
            report = self._reports.of(digests[engine.name])
            loads = loads_of(engine.name, own[index], engines, self._ranks.nodes, report)
            engine.map_memory(self._rounds.segments[index], loads)
            self._mapped.add(engine.name)

        fan_out({engine.name: partial(give, engine) for engine in lacking}, "map_memory", self._timeout_s)

    def _send(
        self,
        rounds: RankRounds,
        version: int,
        calls: EngineCalls,
        sync_errors: SyncErrors,
        clock: Clock,
        on_progress: Progress | None,
    ) -> None:
        sets = {name: index for index, (engines, _) in enumerate(self._planned) for name in engines.receivers}

        def load(number: int) -> None:
            loads = {}
            for engine in calls.engines:
                models = self._models[sets[engine.name]]
                if number < len(models):
                    loads[engine.name] = partial(engine.load_round, models[number], version, number)
            fan_out(loads, "load_round", self._timeout_s)

        def fill(number: int) -> Exception | None:
            with clock("gather"):
                return rounds.fill(number)

        with clock("gather"):
            together(sync_errors, "before the first round", rounds.begin)
        places = [f"at round {number + 1} of {self.parts}" for number in range(self.parts)]
        pipelined = Pipelined(places, sync_errors, clock, on_progress, self._deadline_s)
        pipelined.run(fill, load if calls.engines else None, overlapping=True)


def _end(calls: EngineCalls) -> None:
    calls.each("end_update", lambda engine: engine.end_update())


def _parts(own: Mapping[int, _Rounds]) -> dict[int, dict[int, list[Deliveries]]]:
    """The part of each trainer rank in the rounds of some sets, by the set's index: the deliveries that it sends or
    receives. Of those that it receives, it need not know the entries."""
    parts: dict[int, dict[int, list[list[Delivery]]]] = {}
    for index, rounds in own.items():
        for number, (_, deliveries) in enumerate(rounds):
            for each in deliveries:
                source = each.message.source
                bare = each._replace(message=replace(each.message, entries=()))
                for rank in {source, *(receiver for receiver, _ in each.places)}:
                    of_rank = parts.setdefault(rank, {})
                    part = of_rank.setdefault(index, [[] for _ in rounds])
                    part[number].append(each if rank == source else bare)
    return {
        rank: {index: [tuple(each) for each in part] for index, part in of_rank.items()}
        for rank, of_rank in parts.items()
    }
