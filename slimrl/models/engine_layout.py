"""The place of each Hugging Face tensor in a loaded SGLang model, which fuses parameters.

One table: pattern of engine names -> the Hugging Face tensors in such a parameter, and how the engine's ranks shard
them. A parameter that matches no rule has its Hugging Face name, and every rank holds it whole.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor

from slimrl.models.hf_config import FP8_BLOCK


@dataclass(frozen=True, kw_only=True)
class EngineShape:
    """The sizes on which fused parameters depend."""

    num_heads: int
    num_kv_heads: int
    num_experts: int
    vocab_size: int
    tensor_parallel: int = 1
    """Number of ranks of the engine."""
    expert_parallel: int = 1
    """Number of groups of neighbouring ranks; each group holds an equal part of the experts and shards each of
    these."""
    attention_data_parallel: int = 1
    """Number of groups of neighbouring ranks; each group holds and shards the whole of attention and of the
    embedding."""
    q_latent: int = 0
    """Rows of DeepSeek's down projection of queries; 0 if there is none."""
    kv_latent: int = 0
    """Rows of DeepSeek's down projection of keys and values, with the rotated key; 0 if there is none."""
    expert_width: int = 0
    """Intermediate size of an expert."""
    shared_width: int = 0
    """Intermediate size of the shared experts together."""
    dense_width: int = 0
    """Intermediate size of a dense layer."""
    convolved: tuple[int, ...] = ()
    """Channels of the queries, keys and values of a gated delta net, which go through a convolution."""
    tile_rows: int = FP8_BLOCK[0]
    """Rows of a tile in block FP8, which share a row of `weight_scale_inv`."""

    @classmethod
    def of_config(
        cls, config: Any, tensor_parallel: int, expert_parallel: int = 1, attention_data_parallel: int = 1
    ) -> "EngineShape":
        """The shape that a Hugging Face config gives; families name the number of experts differently."""

        def first(*names: str) -> int:
            return next((value for name in names if (value := getattr(config, name, None))), 0)

        quantization: dict[str, Any] = getattr(config, "quantization_config", None) or {}
        # On a CPU SGLang pads widths so that they divide among ranks, and keeps the original ones next to them.
        expert_width = first("original_moe_intermediate_size", "moe_intermediate_size")
        keys = first("linear_num_key_heads") * first("linear_key_head_dim")
        values = first("linear_num_value_heads") * first("linear_value_head_dim")
        return cls(
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            num_experts=first("num_experts", "n_routed_experts", "num_local_experts"),
            vocab_size=config.vocab_size,
            tensor_parallel=tensor_parallel,
            expert_parallel=expert_parallel,
            attention_data_parallel=attention_data_parallel,
            q_latent=first("q_lora_rank"),
            kv_latent=first("kv_lora_rank") + first("qk_rope_head_dim"),
            expert_width=expert_width,
            shared_width=expert_width * first("n_shared_experts")
            or first("original_shared_expert_intermediate_size", "shared_expert_intermediate_size"),
            dense_width=first("original_intermediate_size", "intermediate_size"),
            convolved=(keys, keys, values) if values else (),
            tile_rows=(quantization.get("weight_block_size") or FP8_BLOCK)[0],
        )

    @property
    def attention_ranks(self) -> int:
        """Ranks that shard attention."""
        return self.tensor_parallel // self.attention_data_parallel

    def expert_location(self, expert: int) -> tuple[int, range]:
        """(index in the parameter, ranks that hold it)."""
        experts, ranks = self.num_experts // self.expert_parallel, self.tensor_parallel // self.expert_parallel
        part, index = divmod(expert, experts)
        return index, range(part * ranks, (part + 1) * ranks)


@dataclass(frozen=True, kw_only=True)
class Holding:
    """The shard of a tensor that one rank of an engine has; other ranks may have copies of it."""

    shard: int
    shards: int
    copy: int


@dataclass(frozen=True, kw_only=True)
class EngineSlice:
    """The place of one Hugging Face tensor in an engine parameter."""

    hf_name: str
    expert: int | None = None
    """Index of the expert in the parameter's first dimension; None for a tensor of no expert."""
    ranks: range | None = None
    """Ranks that hold the tensor or a shard of it; None for all."""
    part: tuple[int, int, int] | None = None
    """Rows of the tensor in the parameter as (first, end, of): in units of 1 / `of` of all rows, once `expert` is
    selected."""
    shard_dim: int | None = None
    """Dimension that these ranks shard; None if each holds the whole."""
    groups: int = 1
    """Number of groups of these ranks, neighbours, each of which shards the whole tensor."""
    replicas: int = 1
    """Number of neighbouring ranks of a group that hold the same shard."""
    size: int | None = None
    """Unpadded size of the whole tensor along `shard_dim`, if the engine may pad it."""
    first_row: int = 0
    """Row of the whole tensor with which this slice and its shards on the other ranks begin."""
    in_model_dtype: bool = False
    """Whether the tensor arrives in the dtype of the embedding, though an engine may hold it in float32."""

    def holding(self, rank: int, tensor_parallel: int) -> Holding | None:
        """The shard of the tensor that a rank has; None if it has none."""
        ranks = self.ranks or range(tensor_parallel)
        if rank not in ranks:
            return None
        size, copies = len(ranks) // self.groups, self.num_copies(tensor_parallel) // self.groups
        group, rank_in_group = divmod(rank - ranks.start, size)
        shard, copy = divmod(rank_in_group, copies)
        return Holding(shard=shard, shards=size // copies, copy=group * copies + copy)

    def num_copies(self, tensor_parallel: int) -> int:
        """Number of ranks that hold the same shard, or the whole tensor."""
        if self.shard_dim is None:
            return len(self.ranks or range(tensor_parallel))
        return self.groups * self.replicas

    def of(self, parameter: Tensor) -> Tensor:
        """View of this rank's shard; the rank must hold one."""
        if self.expert is not None:
            parameter = parameter[self.expert]
        if self.part is not None:
            first, end, of = self.part
            if parameter.shape[0] % of:
                raise ValueError(f"{self.hf_name}: {parameter.shape[0]} rows of the engine do not divide into {of}")
            unit = parameter.shape[0] // of
            parameter = parameter[first * unit : end * unit]
        return parameter


_Rule = Callable[[re.Match[str], EngineShape], list[EngineSlice]]
_SUFFIX = r"(weight|bias|weight_scale_inv)"


def _qkv(match: re.Match[str], shape: EngineShape, *, hf_path: str = "", per_query: int = 1) -> list[EngineSlice]:
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


def _gated_qkv(match: re.Match[str], shape: EngineShape) -> list[EngineSlice]:
    """Slices of Qwen3-Next's attention projection, which SGLang holds in the layer itself; each query head has a gate
    of its output."""
    return _qkv(match, shape, hf_path=".self_attn", per_query=2)


def _in_layer(match: re.Match[str], shape: EngineShape) -> list[EngineSlice]:
    """Slices of the other parameters of Qwen3-Next's attention."""
    layer, name, suffix = match.groups()
    return [EngineSlice(hf_name=f"{layer}.self_attn.{name}.{suffix}", shard_dim=1 if name == "o_proj" else None)]


def _convolution(match: re.Match[str], shape: EngineShape) -> list[EngineSlice]:
    """Channels of queries, keys and values, of each of which every rank holds a part."""
    unit = math.gcd(*shape.convolved)
    return [
        EngineSlice(
            hf_name=match.group(),
            part=(first // unit, end // unit, sum(shape.convolved) // unit),
            shard_dim=0,
            first_row=first,
        )
        for first, end in pairwise(accumulate(shape.convolved, initial=0))
    ]


def _width(path: str, suffix: str, shape: EngineShape) -> int | None:
    """Intermediate size of the MLP at a path; None for scales, which no engine pads."""
    if suffix == "weight_scale_inv":
        return None
    if ".experts" in path:
        return shape.expert_width or None
    shared = path.endswith(("shared_experts", "shared_expert"))
    return (shape.shared_width if shared else shape.dense_width) or None


def _mlps(path: str, shape: EngineShape) -> Iterator[tuple[str, partial[EngineSlice]]]:
    """Path of each MLP in a parameter, one for each expert or the only one, and where the engine holds it."""
    if not path.endswith(".experts"):
        yield path, partial(EngineSlice)
        return
    for expert in range(shape.num_experts):
        index, ranks = shape.expert_location(expert)
        yield f"{path}.{expert}", partial(EngineSlice, expert=index, ranks=ranks)


def _gate_up(match: re.Match[str], shape: EngineShape) -> list[EngineSlice]:
    path, suffix = match.groups()
    size = _width(path, suffix, shape)
    return [
        placed(hf_name=f"{mlp}.{name}_proj.{suffix}", part=(half, half + 1, 2), shard_dim=0, size=size)
        for mlp, placed in _mlps(path, shape)
        for half, name in enumerate(("gate", "up"))
    ]


def _down(match: re.Match[str], shape: EngineShape) -> list[EngineSlice]:
    path, suffix = match.groups()
    size = _width(path, suffix, shape)
    return [placed(hf_name=f"{mlp}.down_proj.{suffix}", shard_dim=1, size=size) for mlp, placed in _mlps(path, shape)]


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


def _unfused(**fields: Any) -> _Rule:
    """A parameter that holds one tensor under its Hugging Face name; `fields` of its EngineSlice."""
    return lambda match, shape: [EngineSlice(hf_name=match.group(), **fields)]


def _vocabulary(match: re.Match[str], shape: EngineShape) -> list[EngineSlice]:
    return [EngineSlice(hf_name=match.group(), shard_dim=0, size=shape.vocab_size)]


_ATTENTION_RULES: list[tuple[str, _Rule]] = [
    (rf"(.+\.self_attn)\.qkv_proj\.{_SUFFIX}", _qkv),
    (rf"(.+\.layers\.\d+)\.qkv_proj\.{_SUFFIX}", _gated_qkv),
    (r"(.+\.layers\.\d+)\.(o_proj|q_norm|k_norm)\.(weight|weight_scale_inv)", _in_layer),
    (r".+\.linear_attn\.conv1d\.weight", _convolution),
    (r".+\.linear_attn\.(in_proj_qkvz|in_proj_ba)\.(weight|weight_scale_inv)", _unfused(shard_dim=0)),
    (r".+\.linear_attn\.(A_log|dt_bias)", _unfused(shard_dim=0, in_model_dtype=True)),
    (r".+\.linear_attn\.out_proj\.(weight|weight_scale_inv)", _unfused(shard_dim=1)),
    (rf"(.+\.self_attn)\.fused_qkv_a_proj_with_mqa\.{_SUFFIX}", _latent_projections),
    (rf".+\.self_attn\.(q_proj|q_b_proj|kv_b_proj)\.{_SUFFIX}", _unfused(shard_dim=0)),
    (r".+\.o_proj\.(weight|weight_scale_inv)", _unfused(shard_dim=1)),
    (r"(.+\.embed_tokens)\.weight", _vocabulary),
]
"""Rules of attention and the embedding, which SGLang shards among the ranks that share requests."""

_OTHER_RULES: list[tuple[str, _Rule]] = [
    (rf"(.+\.experts)\.w13_{_SUFFIX}", _gate_up),
    (rf"(.+\.experts)\.w2_{_SUFFIX}", _down),
    (rf"(.+)\.gate_up_proj\.{_SUFFIX}", _gate_up),
    (r"(.+)\.down_proj\.(weight|weight_scale_inv)", _down),
    (r".+\.mlp\.gate\.weight", _unfused(in_model_dtype=True)),
    (r"lm_head\.weight", _vocabulary),
]


def engine_slices(engine_name: str, shape: EngineShape) -> list[EngineSlice]:
    """The Hugging Face tensors in the engine's parameter of this name."""
    for rules, groups in ((_ATTENTION_RULES, shape.attention_data_parallel), (_OTHER_RULES, 1)):
        for pattern, rule in rules:
            if match := re.fullmatch(pattern, engine_name):
                return [replace(piece, groups=groups) for piece in rule(match, shape)]
    return [EngineSlice(hf_name=engine_name)]
