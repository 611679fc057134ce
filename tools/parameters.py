"""How many parameters a model has, by part, and how many of them compute one token; read from the weight map."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Size

from slimrl.models.megatron_config import MegatronModelConfig
from slimrl.models.weight_map import Entry, WeightMap

PARTS = (
    "embedding",
    "head",
    "attention",
    "dense MLP",
    "routed experts",
    "shared experts",
    "router",
    "norms",
    "MTP",
)
"""In the order in which they are shown."""

_MARKS = (
    ("mtp.", "MTP"),
    ("layernorm", "norms"),
    ("word_embeddings", "embedding"),
    ("output_layer", "head"),
    (".mlp.experts.", "routed experts"),
    (".mlp.shared_experts.", "shared experts"),
    (".mlp.router.", "router"),
    (".mlp.", "dense MLP"),
    (".self_attention.", "attention"),
)
"""The first mark that a Megatron name holds tells its part."""


@dataclass(frozen=True, kw_only=True)
class PartCount:
    part: str
    total: int
    active: int
    """Of one token: of the routed experts those it is sent to, nothing of MTP layers, all of the others."""


def part_of(entry: Entry) -> str:
    """One of PARTS."""
    name = entry.megatron[0]
    for mark, part in _MARKS:
        if mark in name:
            return part
    raise AssertionError(f"{name} belongs to no part of the model")


def count_parameters(
    weight_map: WeightMap, model: MegatronModelConfig, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> list[PartCount]:
    """Parameters of each part that the model has, by Hugging Face tensors.

    Embedding and head count as active whole; some models are published with that figure, others leave the two out.
    A head that is tied to the embedding counts once, as embedding; what MTP layers repeat of the two does not count.

    Args:
        shapes: of the tensors that are there, by name; others then count as absent. None for all that the map has.
    """
    totals = dict.fromkeys(PARTS, 0)
    for entry in weight_map.entries:
        for tensor in entry.hf:
            shape = tensor.shape if shapes is None else shapes.get(tensor.name)
            totals[part_of(entry)] += 0 if shape is None else Size(shape).numel()
    topk, experts = (int(model.transformer.get(name) or 1) for name in ("moe_router_topk", "num_moe_experts"))
    active = totals | {"routed experts": totals["routed experts"] * topk // experts, "MTP": 0}
    return [PartCount(part=part, total=totals[part], active=active[part]) for part in PARTS if totals[part]]
