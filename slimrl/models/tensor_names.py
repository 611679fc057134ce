"""Names and shapes of a checkpoint's tensors, compared with a weight map.

A published checkpoint may hold more than its weights:

| names | where | why they are left out |
|---|---|---|
| `lm_head.weight` next to a tied embedding | Qwen3-0.6B and 1.7B | it repeats the embedding |
| `*.rotary_emb.*` | Moonlight, Kimi-K2 | buffers that every implementation computes from config.json |

Torch-free, so that published names are checked before a model is here.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from slimrl.models.hf_config import BLOCKS_SUFFIX, MXFP4_BLOCK, SCALES_SUFFIX
from slimrl.models.weight_map import HfTensor, Rule, WeightMap

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

MAX_LISTED = 10
"""Tensors of a kind that an error lists; the rest are counted."""

_ROTARY = re.compile(r".+\.rotary_emb\.\w+")
_FUSED_EXPERTS = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")
_EXPERT = re.compile(r"(.+\.experts)\.[^.]+\..+")


@dataclass(frozen=True, kw_only=True)
class TensorMismatches:
    """How a checkpoint's tensors differ from those of a weight map."""

    has_mtp: bool
    """Whether the checkpoint has the layers for multi-token prediction."""
    missing: list[str]
    unknown: list[str]
    misshaped: dict[str, tuple[int, ...]]
    """Name -> the shape that the weight map implies."""

    @property
    def fused(self) -> list[str]:
        """The unknown ones that hold all experts of a layer, as transformers 5 has them in memory."""
        return [name for name in self.unknown if _FUSED_EXPERTS.fullmatch(name)]

    @property
    def fused_line(self) -> str | None:
        """What the fused ones are and what to do; None without any."""
        if not self.fused:
            return None
        return (
            f"{self.fused[0]} and {len(self.fused) - 1} more hold all experts of a layer, as transformers 5 saves them "
            "with save_original_format=False. Save the model without that option where it was made. Loading it with "
            "from_pretrained keeps the format: load its state_dict() into AutoModelForCausalLM.from_config(config), "
            "and save that"
        )

    def lines(self) -> list[str]:
        """What is missing and what is unknown, at most MAX_LISTED of each; fused experts in one line."""
        fused = set(self.fused)
        layers = {match[1] for name in fused if (match := _FUSED_EXPERTS.fullmatch(name))}
        lines = [self.fused_line] if self.fused_line else []
        split = {name for name in self.missing if (match := _EXPERT.fullmatch(name)) and match[1] in layers}
        lines += listed([f"{name}: missing" for name in self.missing if name not in split], "missing")
        lines += listed([f"{name}: not part of this model" for name in self.unknown if name not in fused], "unknown")
        return lines


def listed(lines: list[str], kind: str) -> list[str]:
    """The first MAX_LISTED lines, and how many more there are."""
    more = [f"and {len(lines) - MAX_LISTED} more {kind}"] if len(lines) > MAX_LISTED else []
    return lines[:MAX_LISTED] + more


def find_mismatches(
    weight_map: WeightMap, shapes: Mapping[str, tuple[int, ...]], *, expert_ranges: bool = False
) -> TensorMismatches:
    """Compare tensors by name and shape with a weight map that has the layers for multi-token prediction.

    All of these layers may be missing: some published checkpoints lack them though config.json has their number. Their
    copies of the embedding and the output layer may be missing in any case.

    Args:
        shapes: without the names of `left_out`.
        expert_ranges: the experts of a layer have one name, as `with_expert_ranges` gives it.
    """
    tensors = list(with_expert_ranges(weight_map) if expert_ranges else _tensors(weight_map))
    has_mtp = any(rule.mtp and tensor.name in shapes for rule, tensor in tensors)
    required = [tensor for rule, tensor in tensors if has_mtp or not rule.mtp]
    known = {name: tensor.shape for tensor in required for name in tensor.names}
    return TensorMismatches(
        has_mtp=has_mtp,
        missing=[tensor.name for tensor in required if tensor.name not in shapes],
        unknown=[name for name in shapes if name not in known],
        misshaped={name: shape for name, shape in known.items() if name in shapes and shapes[name] != shape},
    )


def left_out(names: Iterable[str], hf_config: Mapping[str, Any]) -> dict[str, str]:
    """Tensors of a checkpoint that are no weights of the model -> why. A head that is left out must be compared."""
    given = list(names)
    found = {name: "computed from config.json" for name in given if _ROTARY.fullmatch(name)}
    if hf_config.get("tie_word_embeddings") and {EMBEDDING, HEAD} <= set(given):
        found[HEAD] = f"repeats {EMBEDDING}"
    return found


def with_expert_ranges(weight_map: WeightMap) -> Iterator[tuple[Rule, HfTensor]]:
    """The map's tensors, all experts of a layer under one name: `mlp.experts.{0..127}.up_proj.weight`."""
    for rule in weight_map.rules:
        experts = f"{{0..{rule.num_experts - 1}}}" if rule.num_experts else ""
        for layer in rule.layers if rule.layers is not None else (None,):
            for tensor in rule.hf:
                name = tensor.name.replace("{layer}", str(layer)).replace("{expert}", experts)
                stacked = tensor.stacked and tensor.stacked.replace("{layer}", str(layer))
                yield rule, replace(tensor, name=name, stacked=stacked)


def experts_apart(
    weight_map: WeightMap, shapes: Mapping[str, tuple[int, ...]], *, expert_ranges: bool = False
) -> dict[str, tuple[int, ...]]:
    """The same tensors with those of each expert in place of one that holds those of all, plain or in MXFP4, where the
    map has them so; arguments as those of `find_mismatches`."""
    apart = dict(shapes)
    for _, tensor in with_expert_ranges(weight_map) if expert_ranges else _tensors(weight_map):
        if tensor.stacked is None:
            continue
        if tensor.stacked in shapes:
            apart.pop(tensor.stacked, None)
            apart[tensor.name] = shapes[tensor.stacked][:0:-1]
        elif (blocks := shapes.get(tensor.stacked + BLOCKS_SUFFIX)) is not None:
            for suffix in (BLOCKS_SUFFIX, SCALES_SUFFIX):
                apart.pop(tensor.stacked + suffix, None)
            apart[tensor.name] = (*blocks[1:-2], blocks[-2] * MXFP4_BLOCK)
    return apart


def _tensors(weight_map: WeightMap) -> Iterator[tuple[Rule, HfTensor]]:
    return ((entry.rule, tensor) for entry in weight_map.entries for tensor in entry.hf)
