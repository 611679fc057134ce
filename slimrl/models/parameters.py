"""Parameters of a model by part, in total and active per token, counted in the weight map."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from slimrl.models.megatron_config import MegatronModelConfig
from slimrl.models.weight_map import Entry, WeightMap

PARTS = ("embedding", "head", "attention", "dense MLP", "routed experts", "shared experts", "router", "norms", "MTP")
"""Names of a model's parts, in the order in which they are shown."""

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
"""(mark, part): a Megatron name belongs to the part of the first mark in it."""


@dataclass(frozen=True, kw_only=True)
class PartCount:
    part: str
    total: int
    active: int
    """Parameters that one token uses: top-k of the routed experts, none of the MTP layers, all of the rest."""


def part_of(entry: Entry) -> str:
    """Name of the part that an entry belongs to, one of PARTS."""
    name = entry.rule.megatron[0]
    for mark, part in _MARKS:
        if mark in name:
            return part
    raise AssertionError(f"{name} belongs to no part of the model")


def count_parameters(
    weight_map: WeightMap, model: MegatronModelConfig, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> list[PartCount]:
    """Parameters of each part that the model has, by Hugging Face tensors.

    Embedding and head count as active; some published figures leave the two out. A head that is tied to the embedding
    counts once, as embedding; copies of the two in MTP layers do not count.

    Args:
        shapes: of the tensors that are there, by name; tensors without a shape count as absent. None for all.
    """
    totals = dict.fromkeys(PARTS, 0)
    for entry in weight_map.entries:
        for tensor in entry.rule.hf:
            shape = tensor.shape if shapes is None else shapes.get(entry.named(tensor.name))
            totals[part_of(entry)] += 0 if shape is None else prod(shape)
    topk, experts = (int(model.transformer.get(name) or 1) for name in ("moe_router_topk", "num_moe_experts"))
    active = totals | {"routed experts": totals["routed experts"] * topk // experts, "MTP": 0}
    return [PartCount(part=part, total=totals[part], active=active[part]) for part in PARTS if totals[part]]
