"""What the ranks of an engine keep, from the model's config alone.

A running engine says itself what it keeps (slimrl/engines/plugin/kept_tensors.py). Here the names of its parameters are
guessed from those of the tensors, by SGLang's habits of fusing them, and the rules of engine_layout.py say the rest. A
tensor that no rule names is taken to be kept whole by every rank.
"""

import re
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from slimrl.data.boxes import Box, elements
from slimrl.data.model_weights import TensorSpec
from slimrl.models.engine_layout import engine_slices
from slimrl.models.engine_slice import EngineShape, EngineSlice
from slimrl.resync.p2p.demand import Kept

_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "q_a_proj": "fused_qkv_a_proj_with_mqa",
    "kv_a_proj_with_mqa": "fused_qkv_a_proj_with_mqa",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "in_proj_qkv": "in_proj_qkvz",
    "in_proj_z": "in_proj_qkvz",
    "in_proj_b": "in_proj_ba",
    "in_proj_a": "in_proj_ba",
}
"""SGLang's fused layer of each layer"""

_PADDED = ("embed_tokens", "lm_head")
VOCAB_MULTIPLE = 64
"""SGLang pads the vocabulary to a multiple of this."""

_EXPERT = re.compile(r"(.+\.experts)\.\d+\.\w+\.(weight|bias|weight_scale_inv)")


def planned_kept(
    specs: Sequence[TensorSpec],
    hf_config: dict[str, Any],
    *,
    tensor_parallel: int,
    expert_parallel: int,
    attention_data_parallel: int,
) -> list[Kept]:
    """The regions that each rank of an engine keeps.

    Args:
        specs: of the tensors as the engine gets them.
    """
    shape = EngineShape.of_config(
        SimpleNamespace(**hf_config), tensor_parallel, expert_parallel, attention_data_parallel
    )
    by_name = {spec.name: spec for spec in specs}
    slices: dict[str, list[EngineSlice]] = {}
    for guesses in (_fused_names, _own_names):
        missing = [name for name in by_name if name not in slices]
        for engine_name in dict.fromkeys(guess for name in missing for guess in guesses(name)):
            found: dict[str, list[EngineSlice]] = {}
            for piece in engine_slices(engine_name, shape):
                found.setdefault(piece.hf_name, []).append(piece)
            # The first guess that has the tensor counts.
            slices |= {name: pieces for name, pieces in found.items() if name in by_name and name not in slices}
    kept: list[dict[str, list[Box]]] = [{} for _ in range(tensor_parallel)]
    for name, pieces in slices.items():
        for rank in sorted({rank for piece in pieces for rank in piece.ranks or range(tensor_parallel)}):
            if held := [box for box in _boxes(by_name[name], pieces, rank, tensor_parallel) if elements(box)]:
                kept[rank][name] = held
    return list(kept)


def _fused_names(name: str) -> Iterator[str]:
    """Guesses of the engine's parameter that holds a tensor with others, the likeliest first."""
    if match := _EXPERT.fullmatch(name):
        layer, suffix = match.groups()
        stored = "weight_bias" if suffix == "bias" else suffix
        yield from (f"{layer}.{fused}_{kind}" for kind in dict.fromkeys((stored, suffix)) for fused in ("w13", "w2"))
    path, _, suffix = name.rpartition(".")
    layer, _, leaf = path.rpartition(".")
    if leaf in _FUSED:
        yield f"{layer}.{_FUSED[leaf]}.{suffix}"


def _own_names(name: str) -> Iterator[str]:
    """Guesses of the engine's parameter that holds nothing else."""
    yield name
    # Layers of attention beside gated delta nets.
    yield name.replace(".self_attn.", ".")


def _boxes(spec: TensorSpec, pieces: Sequence[EngineSlice], rank: int, num_ranks: int) -> Iterator[Box]:
    """What a rank keeps of a tensor, of each of its sections."""
    starts = sorted(piece.first_row for piece in pieces)
    for piece in pieces:
        held = piece.holding(rank, num_ranks)
        if held is None:
            continue
        edges = [(0, size) for size in spec.shape]
        if edges:
            edges[0] = (piece.first_row, next((row for row in starts if row > piece.first_row), spec.shape[0]))
        if piece.shard_dim is not None:
            start, stop = edges[piece.shard_dim]
            size = -(-(stop - start) // held.shards)
            if held.shards > 1 and spec.name.rpartition(".")[0].rpartition(".")[2] in _PADDED:
                # The vocabulary is padded as a whole.
                size = -(-spec.shape[0] // VOCAB_MULTIPLE) * VOCAB_MULTIPLE // held.shards
            first = min(start + held.shard * size, stop)
            edges[piece.shard_dim] = (first, min(first + size, stop))
        yield tuple(edges)
