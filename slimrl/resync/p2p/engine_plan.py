"""What every trainer rank sends to every engine, from what each holds and keeps: a pure function, equal on all ranks.

Where the engines have more ranks than the trainer, engines that keep the same form chains: the trainer sends to the
first of each, and every rank passes on what it got from outside of its engine, to the same rank of the next engine,
round by round. So no trainer rank sends much more than an engine's rank receives.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from slimrl.data.model_weights import EngineModel
from slimrl.data.peer_messages import Round
from slimrl.resync.p2p.demand import Kept, SentTensor, demands
from slimrl.resync.p2p.rounds import Slots, plan_rounds
from slimrl.resync.p2p.shares import Choice, Shares

SLOTS = 2
"""Buffers of each end that take turns."""


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """How one engine gets a version."""

    rounds: Mapping[EngineModel, tuple[Round, ...]]
    """The rounds of the engine's model, and of its draft model if that is sent"""
    num_ranks: int
    """Number of the engine's ranks"""
    sources: tuple[int, ...]
    """Ranks that send to it, ascending"""
    feeder: int | None = None
    """Index of the engine whose ranks are the sources of the messages; None where trainer ranks are"""

    @property
    def world_size(self) -> int:
        """Members of the engine's group: its ranks, then the sources."""
        return self.num_ranks + len(self.sources)

    def member(self, source: int) -> int:
        """The number of a source in the group."""
        return self.num_ranks + self.sources.index(source)

    def is_sent_by(self, rank: int) -> bool:
        """Whether a trainer rank sends to it."""
        return self.feeder is None and rank in self.sources

    def sent_by(self, rank: int) -> "EnginePlan":
        """The plan with no other messages than those of one trainer rank."""
        rounds = {
            model: tuple(tuple(m for m in messages if m.source == rank) for messages in each)
            for model, each in self.rounds.items()
        }
        return replace(self, rounds=rounds)

    def rounds_by_rank(self) -> list[dict[EngineModel, list[Round]]]:
        """The messages that each rank of the engine gets, whose sources are numbers of members."""
        members = {source: self.member(source) for source in self.sources}
        return [
            {
                model: [
                    tuple(replace(m, source=members[m.source]) for m in messages if rank in m.ranks)
                    for messages in rounds
                ]
                for model, rounds in self.rounds.items()
            }
            for rank in range(self.num_ranks)
        ]


class EnginePlans:
    """The plans of a set of engines. Each is computed when it is asked for: those of a large model are long.

    Args:
        engines: what each rank of each engine keeps, by the model that keeps it. Engines that keep the same have the
            same object.
        num_ranks: of the trainer; None: it feeds all engines, however many ranks they have.
        bucket_bytes: most bytes that a rank holds beside its weights.
        chosen: of each engine, see Shares.
    """

    def __init__(
        self,
        tensors: Sequence[SentTensor],
        engines: Sequence[Mapping[EngineModel, Sequence[Kept]]],
        *,
        num_ranks: int | None,
        bucket_bytes: int,
        chosen: Sequence[Choice] | None = None,
    ) -> None:
        self._specs = [tensor.spec for tensor in tensors]
        self._engines = engines
        self.feeders = [None] * len(engines) if num_ranks is None else chains(engines, num_ranks)
        """Index of the engine that feeds each one, which comes before it; None for those that the trainer feeds"""
        self._heads = [index for index, feeder in enumerate(self.feeders) if feeder is None]
        alike = {id(engines[index]): engines[index] for index in self._heads}
        needed = {
            key: [d for model, kept in models.items() for d in demands(tensors, kept, mtp=model is EngineModel.draft)]
            for key, models in alike.items()
        }
        self._shares = Shares(
            [needed[id(engines[index])] for index in self._heads],
            None if chosen is None else [chosen[index] for index in self._heads],
        )
        self._slots = Slots(
            engine=bucket_bytes // SLOTS, trainer=bucket_bytes // (SLOTS * max(1, self._shares.most_served()))
        )

    @property
    def sent(self) -> Mapping[int, int]:
        """Bytes that each trainer rank is to send, but for what cuts between rows add and take."""
        return self._shares.sent

    def of(self, index: int) -> EnginePlan:
        """The plan of one engine.

        Raises:
            ValueError: a row of a tensor does not fit into `bucket_bytes`.
        """
        feeder = self.feeders[index]
        if feeder is not None:
            return _fed(self.of(feeder), feeder)
        models = self._engines[index]
        shares = self._shares.of(self._heads.index(index))
        rounds = {
            model: plan_rounds(
                [one for one in shares if self._specs[one.tensor].mtp is (model is EngineModel.draft)],
                self._specs,
                self._slots,
            )
            for model in models
        }
        return EnginePlan(
            rounds=rounds,
            num_ranks=len(models[EngineModel.target]),
            sources=tuple(sorted({share.source for share in shares})),
        )


def chains(engines: Sequence[Mapping[EngineModel, Sequence[Kept]]], num_ranks: int) -> list[int | None]:
    """The engine that feeds each one, which comes before it; None for those that the trainer feeds."""
    total = sum(len(models[EngineModel.target]) for models in engines)
    length = -(-total // num_ranks)
    alike: dict[int, list[int]] = {}
    feeders: list[int | None] = []
    for index, models in enumerate(engines):
        before = alike.setdefault(id(models), [])
        feeders.append(before[-1] if len(before) % length else None)
        before.append(index)
    return feeders


def _fed(plan: EnginePlan, feeder: int) -> EnginePlan:
    """The plan of an engine that gets what another one with this plan got, each rank from the same rank."""
    rounds = {
        model: tuple(tuple(replace(m, source=m.target) for m in messages) for messages in each)
        for model, each in plan.rounds.items()
    }
    ranks = tuple(range(plan.num_ranks))
    return EnginePlan(rounds=rounds, num_ranks=plan.num_ranks, sources=ranks, feeder=feeder)
