"""Estimates a resync through the `p2p` transport: the plan of a run, its bytes on every link, and its seconds."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slimrl.checkpoints.safetensors_file import element_bytes, spec_bytes
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.data.boxes import elements
from slimrl.data.model_weights import EngineModel, EnginePlace, SourceLayout
from slimrl.estimates.resync.engine_regions import planned_kept
from slimrl.estimates.resync.estimate import Estimate
from slimrl.estimates.resync.machine import GB, Machine
from slimrl.estimates.resync.peer_pipeline import pipeline_seconds, round_seconds
from slimrl.estimates.resync.peer_traffic import count_traffic
from slimrl.resync.p2p.demand import Kept, SentTensor
from slimrl.resync.p2p.engine_plan import EnginePlans
from slimrl.resync.transform import Quantize

_ABSMAX_READS = 2
"""Times that a weight is read for the scales of its tiles: for the largest value, and for the smallest"""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Bytes of several ranks."""

    least: int
    mean: int
    most: int

    @classmethod
    def of(cls, values: Iterable[int]) -> "Spread":
        known = list(values)
        return cls(least=min(known, default=0), mean=sum(known) // max(1, len(known)), most=max(known, default=0))


@dataclass(frozen=True, kw_only=True)
class PeerEstimate(Estimate):
    sent_by_rank: Spread
    """Bytes that each trainer rank sends"""
    kept_by_rank: Spread
    """Bytes that each rank of an engine keeps, and so receives"""
    adapter_bytes: int
    """Bytes of the busiest network adapter in one direction"""
    rounds: int
    messages: int
    """Most messages that an engine gets from outside"""
    entries: int
    """Regions in the messages to all engines"""
    chain: int
    """Engines of the longest chain in which each passes on what it gets"""
    limit_seconds: float
    """The larger of what a rank sends and what one keeps, through one adapter; with `ipc` of what crosses the network
    through one adapter, and the former over NVLink"""


def planned_models(
    tensors: Sequence[SentTensor], hf_config: dict[str, Any], rollout: RolloutConfig
) -> dict[EngineModel, Sequence[Kept]]:
    """What the ranks of an engine keep, in its model and in its draft model if that is sent."""
    by_model = {
        model: [tensor.spec for tensor in tensors if tensor.spec.mtp is (model is EngineModel.draft)]
        for model in EngineModel
    }
    return {
        model: planned_kept(
            specs,
            hf_config,
            tensor_parallel=rollout.engine_tp,
            expert_parallel=rollout.engine_ep,
            attention_data_parallel=rollout.engine_attention_dp,
        )
        for model, specs in by_model.items()
        if specs
    }


def estimate_models(
    layout: SourceLayout,
    trainer_nodes: Sequence[str],
    engines: Sequence[EnginePlace],
    machine: Machine,
    *,
    tensors: Sequence[SentTensor],
    models: Mapping[EngineModel, Sequence[Kept]],
    bucket_bytes: int,
    transform: Quantize | None,
) -> PeerEstimate:
    """
    Args:
        models: what each rank of each engine keeps.
    """
    num_ranks = len(trainer_nodes)
    plans = EnginePlans(tensors, [models] * len(engines), num_ranks=num_ranks, bucket_bytes=bucket_bytes)
    traffic = count_traffic(plans, engines, trainer_nodes)
    levels = [
        [round_seconds(each, before, machine) for before, each in zip([None, *rounds[:-1]], rounds, strict=True)]
        for rounds in traffic.levels
    ]
    settle, settled_bytes = settle_cost(layout, transform, machine)
    total, sent = traffic.total(), traffic.sent_by() if traffic.levels else Counter[int]()
    of_all = [each for rounds in levels for each in rounds]
    stages = {
        "settle": settle,
        "stage": sum(each.stage for each in levels[0]) if levels else 0.0,
        "agree": sum(each.agree for each in of_all),
        "send": sum(each.send for each in of_all),
        "pass on": sum(each.pass_on for each in of_all),
        "place": sum(each.place for each in of_all),
    }
    spread = kept_by_rank(tensors, models) if engines else Spread.of(())
    sent_by_rank = Spread.of(sent[rank] for rank in range(num_ranks))
    memory = traffic.moved_in_memory() + settled_bytes
    links = {"memory": memory, "nvlink": total.nvlink_out.total(), "network": total.network_out.total()}
    return PeerEstimate(
        tensors=len(layout),
        gathered_bytes=sum(map(spec_bytes, layout)),
        sent_bytes=sum(spec_bytes(tensor.spec) for tensor in tensors),
        link_bytes={name: nbytes for name, nbytes in links.items() if nbytes},
        seconds=settle + pipeline_seconds(levels),
        stage_seconds={name: seconds for name, seconds in stages.items() if seconds},
        sent_by_rank=sent_by_rank,
        kept_by_rank=spread,
        adapter_bytes=total.network,
        rounds=max(map(len, levels), default=0),
        messages=max(traffic.engine_messages, default=0),
        entries=traffic.entries,
        chain=len(levels),
        limit_seconds=max(sent_by_rank.most, spread.most) / (machine.network_gb_per_s * GB),
    )


def settle_cost(layout: SourceLayout, transform: Quantize | None, machine: Machine) -> tuple[float, int]:
    """(seconds of the rank with the most to do, bytes that all read) for the scales of all quantised matrices."""
    pieces: Counter[int] = Counter()
    nbytes: Counter[int] = Counter()
    for spec, held in layout.items():
        if transform is not None and transform.changes(spec):
            for piece in held:
                size = elements(tuple((edge.start, edge.stop) for edge in piece.region)) * element_bytes(spec.dtype)
                for rank in piece.holders:
                    pieces[rank] += 1
                    nbytes[rank] += _ABSMAX_READS * size
    launching = max(pieces.values(), default=0) * machine.settle_us * 1e-6
    return max(launching, max(nbytes.values(), default=0) / (machine.memory_gb_per_s * GB)), nbytes.total()


def kept_by_rank(tensors: Sequence[SentTensor], models: Mapping[EngineModel, Sequence[Kept]]) -> Spread:
    """Bytes that the ranks of an engine keep, in all of its models."""
    sizes = {tensor.spec.name: element_bytes(tensor.spec.dtype) for tensor in tensors}
    return Spread.of(
        sum(elements(box) * sizes[name] for kept in of_rank for name, boxes in kept.items() for box in boxes)
        for of_rank in zip(*models.values(), strict=True)
    )
