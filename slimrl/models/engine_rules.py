"""What parameters of SGLang's models hold, by the names that families share. Those of one family are in its file."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from slimrl.models.engine_slice import EngineRule, EngineShape, EngineSlice

SUFFIX = r"(weight|bias|weight_scale_inv)"


def qkv(match: re.Match[str], shape: EngineShape, *, hf_path: str = "", per_query: int = 1) -> list[EngineSlice]:
    """`per_query`: heads of rows for each query head."""
    path, suffix = match.groups()
    path += hf_path
    query_heads = per_query * shape.num_heads // shape.attention_ranks
    kv_heads = max(1, shape.num_kv_heads // shape.attention_ranks)
    # Ranks that hold the same key-value heads: more than 1 if there are more ranks than heads.
    replicas = max(1, shape.attention_ranks // shape.num_kv_heads)
    rows = query_heads + 2 * kv_heads
    bounds = {
        "q": (0, query_heads),
        "k": (query_heads, query_heads + kv_heads),
        "v": (query_heads + kv_heads, rows),
    }
    return [
        EngineSlice(
            hf_name=f"{path}.{name}_proj.{suffix}",
            part=(first, end, rows),
            shard_dim=0,
            replicas=1 if name == "q" else replicas,
        )
        for name, (first, end) in bounds.items()
    ]


def _width(path: str, suffix: str, shape: EngineShape) -> int | None:
    """Intermediate size of the MLP at a path; None for scales, which no engine pads."""
    if suffix == "weight_scale_inv":
        return None
    if ".experts" in path:
        return shape.expert_width or None
    shared = path.endswith(("shared_experts", "shared_expert", "shared_mlp"))
    return (shape.shared_width if shared else shape.dense_width) or None


def _mlps(path: str, shape: EngineShape) -> Iterator[tuple[str, partial[EngineSlice]]]:
    """Path of each MLP in a parameter, one for each expert or the only one, and where the engine holds it."""
    if not path.endswith(".experts"):
        yield path, partial(EngineSlice)
        return
    for expert in range(shape.num_experts):
        index, ranks = shape.expert_location(expert)
        yield f"{path}.{expert}", partial(EngineSlice, expert=index, ranks=ranks)


def gate_up(
    match: re.Match[str], shape: EngineShape, *, names: tuple[str, str] = ("gate_proj", "up_proj")
) -> list[EngineSlice]:
    """`names`: of the two matrices in Hugging Face's checkpoint."""
    path, suffix = match.groups()
    size = _width(path, suffix, shape)
    return [
        placed(hf_name=f"{mlp}.{name}.{suffix}", part=(half, half + 1, 2), shard_dim=0, size=size)
        for mlp, placed in _mlps(path, shape)
        for half, name in enumerate(names)
    ]


def down(match: re.Match[str], shape: EngineShape, *, name: str = "down_proj") -> list[EngineSlice]:
    path, suffix = match.groups()
    size = _width(path, suffix, shape)
    return [placed(hf_name=f"{mlp}.{name}.{suffix}", shard_dim=1, size=size) for mlp, placed in _mlps(path, shape)]


def _latent_projections(match: re.Match[str], shape: EngineShape) -> list[EngineSlice]:
    """Scales are fused as the weights are; each of the two projections ends with a tile of its own."""
    path, suffix = match.groups()
    unit = shape.tile_rows if suffix == "weight_scale_inv" else 1
    query, key_value = -(-shape.q_latent // unit), -(-shape.kv_latent // unit)
    rows = query + key_value
    return [
        EngineSlice(hf_name=f"{path}.q_a_proj.{suffix}", part=(0, query, rows)),
        EngineSlice(hf_name=f"{path}.kv_a_proj_with_mqa.{suffix}", part=(query, rows, rows)),
    ]


def unfused(**fields: Any) -> Callable[[re.Match[str], EngineShape], list[EngineSlice]]:
    """A parameter that holds one tensor under its Hugging Face name; `fields` of its EngineSlice."""
    return lambda match, shape: [EngineSlice(hf_name=match.group(), **fields)]


def _norm_over_heads(match: re.Match[str], shape: EngineShape) -> list[EngineSlice]:
    """Each rank holds the part of its own heads."""
    replicas = 1 if match[1] == "q" else max(1, shape.attention_ranks // shape.num_kv_heads)
    return [EngineSlice(hf_name=match.group(), shard_dim=0, replicas=replicas)]


NORM_OVER_HEADS = EngineRule(pattern=r".+\.self_attn\.([qk])_norm\.weight", slices=_norm_over_heads, attention=True)
"""For families whose queries are normalised over all heads together, and keys too."""


def _vocabulary(match: re.Match[str], shape: EngineShape) -> list[EngineSlice]:
    return [EngineSlice(hf_name=match.group(), shard_dim=0, size=shape.vocab_size)]


SHARED_RULES = (
    EngineRule(pattern=rf"(.+\.self_attn)\.qkv_proj\.{SUFFIX}", slices=qkv, attention=True),
    EngineRule(
        pattern=rf"(.+\.self_attn)\.fused_qkv_a_proj_with_mqa\.{SUFFIX}", slices=_latent_projections, attention=True
    ),
    EngineRule(
        pattern=rf".+\.self_attn\.(q_proj|q_b_proj|kv_b_proj)\.{SUFFIX}", slices=unfused(shard_dim=0), attention=True
    ),
    EngineRule(pattern=r".+\.o_proj\.(weight|weight_scale_inv)", slices=unfused(shard_dim=1), attention=True),
    EngineRule(pattern=r"(.+\.embed_tokens)\.weight", slices=_vocabulary, attention=True),
    EngineRule(pattern=rf"(.+\.experts)\.w13_{SUFFIX}", slices=gate_up),
    EngineRule(pattern=rf"(.+\.experts)\.w2_{SUFFIX}", slices=down),
    EngineRule(pattern=rf"(.+)\.gate_up_proj\.{SUFFIX}", slices=gate_up),
    EngineRule(pattern=r"(.+)\.down_proj\.(weight|weight_scale_inv)", slices=down),
    EngineRule(pattern=r".+\.mlp\.gate\.weight", slices=unfused(in_model_dtype=True)),
    EngineRule(pattern=r".+\.indexer\.k_norm\.(weight|bias)", slices=unfused(in_model_dtype=True)),
    EngineRule(pattern=r"lm_head\.weight", slices=_vocabulary),
)
