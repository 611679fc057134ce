"""The `ipc` transport: engines load what they keep out of the memory of trainer ranks on their nodes.

Once for a set of engines:

1. Each engine says what its ranks keep. Trainer ranks on its nodes, its receivers, get that for it (receivers.py).
2. The plan is that of `p2p`: which rank sends which region to which receiver in which round (deliveries.py). One rank
   of each node plans for its engines and tells the others their parts.
3. Receivers allocate their slots, and the engines are told what will lie where in them.

Then for each version, after the pause and the settling of scales, round by round: fill the slots (rank_rounds.py) and
have the engines load them, while the next round is filled. After a fault the version starts again for the engines that
can continue.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from slimrl.checkpoints.safetensors_file import spec_bytes
from slimrl.config.schema.resync import PauseMode
from slimrl.data.model_weights import EngineControl, EngineModel, WeightSource
from slimrl.resync.engine_calls import EngineCalls, fan_out
from slimrl.resync.expected_fingerprints import ExpectedFingerprints
from slimrl.resync.ipc.deliveries import Delivery, NodeRounds, loads_of, rounds_of
from slimrl.resync.ipc.rank_rounds import RankRounds
from slimrl.resync.ipc.receivers import NodeEngines, node_engines, node_plans
from slimrl.resync.p2p.demand import sent_tensors
from slimrl.resync.p2p.engine_plan import SLOTS
from slimrl.resync.p2p.kept_reports import KeptReports, Report
from slimrl.resync.p2p.sent_values import SentValues
from slimrl.resync.ranks import Ranks, StartAgain, sync_errors_across_ranks
from slimrl.resync.report import Clock
from slimrl.resync.steps import Pipelined, together
from slimrl.resync.transfer import Progress, SyncErrors, Transfer
from slimrl.resync.transform import Quantize


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
        self._nodes: list[NodeEngines] = []
        """The engines of each node, as planned"""
        self._digests: dict[str, str] = {}
        """The digest of what each planned engine keeps, by its name"""
        self._models: list[EngineModel] = []
        """The model of each round"""
        self._mapped: set[str] = set()
        """This rank's engines that have the plan"""
        self._rounds = RankRounds(self._values, ranks, run_id=run_id, timeout_s=deadline_s)
        self.use(engines)

    def use(self, engines: Sequence[EngineControl]) -> None:
        self._on_nodes(engines)
        kept = {engine.name for engine in engines if engine in self._engines}
        gone = {engine.name for engine in [*self._engines, *engines]} - kept
        self._reports.forget(gone)
        self._mapped -= gone
        self._engines = list(engines)

    def mine(self) -> list[EngineControl]:
        """Those whose first node this rank leads."""
        leaders = {node.node: node.leader for node in self._on_nodes(self._engines)}
        return [engine for engine in self._engines if leaders[engine.place.nodes[0]] == self._ranks.rank]

    def _on_nodes(self, engines: Sequence[EngineControl]) -> list[NodeEngines]:
        return node_engines([engine.place for engine in engines], self._ranks.nodes)

    @property
    def sent_bytes(self) -> int:
        return sum(spec_bytes(tensor.spec) for tensor in self._tensors)

    @property
    def parts(self) -> int:
        return len(self._models)

    @property
    def nbytes(self) -> int:
        return self._rounds.nbytes

    @property
    def sent_by_rank(self) -> int:
        return self._rounds.sent_bytes

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
                self._send(calls, sync_errors, clock, on_progress)
                with clock("activate"):
                    together(sync_errors, "after the last round", partial(_end, calls))
                with clock("hash"):
                    self._values.record(expected)
                return
            except StartAgain:
                continue

    def close(self) -> None:
        self._rounds.close()
        self._nodes, self._digests, self._models = [], {}, []
        self._mapped.clear()

    def _prepare(self, calls: EngineCalls) -> None:
        calls.each("pause", lambda engine: engine.pause(self._pause))
        calls.each("begin_update", lambda engine: engine.begin_update())

    def _ask(self, calls: EngineCalls) -> None:
        self._reports.ask(calls.engines, self._timeout_s)

    def _connect(self, sync_errors: SyncErrors, calls: EngineCalls) -> None:
        """Plan anew if these are other engines than before, and give the plan to those that lack it."""
        digests = self._reports.share()
        nodes = self._on_nodes([engine for engine in self._engines if engine.name in digests])
        planned: dict[str, NodeRounds] = {}
        if nodes != self._nodes or digests != self._digests:
            self._nodes, self._digests, self._models = nodes, digests, []
            self._mapped.clear()
            try:
                self._make_rounds(sync_errors, planned)
            except Exception:
                # The next attempt plans again.
                self.close()
                raise
        together(sync_errors, "giving the engines their plan", partial(self._map, calls, planned))

    def _make_rounds(self, sync_errors: SyncErrors, planned: dict[str, NodeRounds]) -> None:
        """Plan for the engines of this rank's node, if it leads one, into `planned`; and follow this rank's part of all
        plans."""
        own = {node.node for node in self._nodes if node.leader == self._ranks.rank}
        together(sync_errors, "planning what each rank sends", partial(self._plan, own, planned))
        counts: Counter[EngineModel] = Counter()
        for each in self._ranks.gather_objects([_counts(planned[node]) for node in own]):
            for count in each:
                counts |= count
        self._models = [model for model in EngineModel for _ in range(counts[model])]
        rounds: list[list[Delivery]] = [[] for _ in self._models]
        parts = _parts([planned[node] for node in own], counts)
        for part in self._ranks.exchange_objects(parts).values():
            for number, deliveries in part.items():
                rounds[number] += deliveries
        self._rounds.use([tuple(each) for each in rounds])

    def _plan(self, nodes: Collection[str], planned: dict[str, NodeRounds]) -> None:
        """Plan for the engines of some nodes, into `planned`."""
        if not nodes:
            return
        plans = node_plans(
            self._tensors,
            self._nodes,
            self._digests,
            {name: self._report(name) for name in self._digests},
            nodes=self._ranks.nodes,
            bucket_bytes=self._bucket_bytes,
        )
        for index, node in enumerate(self._nodes):
            if node.node in nodes:
                planned[node.node] = rounds_of(plans.of(index), node)

    def _report(self, name: str) -> Report:
        return self._reports.of(self._digests[name])

    def _map(self, calls: EngineCalls, planned: dict[str, NodeRounds]) -> None:
        """Give the plan to this rank's engines that lack it.

        Args:
            planned: rounds of some nodes, as far as they are known.
        """
        lacking = [engine for engine in calls.engines if engine.name not in self._mapped]
        self._plan({node for engine in lacking for node in engine.place.nodes} - planned.keys(), planned)

        def give(engine: EngineControl) -> None:
            report, name = self._report(engine.name), engine.name
            loads = {
                rank: loads_of(name, rank, planned[node.node], node, report)
                for node in self._nodes
                for rank in node.receivers.get(name, ())
            }
            receivers = {rank for node in self._nodes if name in node.receivers for rank in node.all_receivers}
            segments = {rank: each for rank, each in self._rounds.segments.items() if rank in receivers}
            engine.map_memory(segments, [loads[rank] for rank in range(engine.place.num_ranks)])
            self._mapped.add(name)

        fan_out({engine.name: partial(give, engine) for engine in lacking}, "map_memory", self._timeout_s)

    def _send(self, calls: EngineCalls, sync_errors: SyncErrors, clock: Clock, on_progress: Progress | None) -> None:
        first = {model: self._models.index(model) for model in set(self._models)}

        def load(number: int) -> None:
            model = self._models[number]
            calls.each("load_round", lambda engine: engine.load_round(model, number - first[model], number % SLOTS))

        def fill(number: int) -> Exception | None:
            with clock("gather"):
                return self._rounds.fill(number)

        with clock("gather"):
            together(sync_errors, "before the first round", self._rounds.begin)
        places = [f"at round {number + 1} of {self.parts}" for number in range(self.parts)]
        pipelined = Pipelined(places, sync_errors, clock, on_progress, self._deadline_s)
        pipelined.run(fill, load if calls.engines else None, overlapping=True)


def _end(calls: EngineCalls) -> None:
    calls.each("end_update", lambda engine: engine.end_update())


def _counts(rounds: NodeRounds) -> Counter[EngineModel]:
    return Counter({model: len(of_model) for model, of_model in rounds.items()})


def _parts(planned: Sequence[NodeRounds], counts: Mapping[EngineModel, int]) -> dict[int, dict[int, list[Delivery]]]:
    """The part of each trainer rank in some rounds, by their number: the deliveries that it sends or receives. Of those
    that it receives, it need not know the entries.

    Args:
        counts: rounds of each model; those of one come after those of the other.
    """
    parts: dict[int, dict[int, list[Delivery]]] = {}
    for rounds in planned:
        start = 0
        for model in EngineModel:
            for number, deliveries in enumerate(rounds.get(model, ()), start):
                for each in deliveries:
                    source = each.message.source
                    parts.setdefault(source, {}).setdefault(number, []).append(each)
                    if each.receiver != source:
                        bare = each._replace(message=replace(each.message, entries=()))
                        parts.setdefault(each.receiver, {}).setdefault(number, []).append(bare)
            start += counts[model]
    return parts
