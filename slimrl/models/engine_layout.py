"""Where each Hugging Face tensor lies in a loaded SGLang model, whose parameters are fused.

One table: engine name pattern -> the Hugging Face tensors in it and how an engine of several ranks shards them.
A parameter that no rule names is held whole, under its Hugging Face name, by every rank.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from slimrl.models.fp8 import DEFAULT_BLOCK


@dataclass(frozen=True, kw_only=True)
class EngineShape:
    """The sizes that the fusions depend on."""

    num_heads: int
    num_kv_heads: int
    num_experts: int
    vocab_size: int
    tensor_parallel: int = 1
    """Ranks of the engine"""
    expert_parallel: int = 1
    """Parts into which its experts are divided; neighbouring ranks hold the same part and shard each of its experts."""
    q_latent: int = 0
    """Rows of DeepSeek's projection to the latent queries; 0 where there is none."""
    kv_latent: int = 0
    """Rows of its projection to the latent keys and values and the rotated key."""
    expert_width: int = 0
    """Inner columns of an expert."""
    shared_width: int = 0
    """Those of the shared experts together."""
    dense_width: int = 0
    """Those of a dense layer."""
    tile_rows: int = DEFAULT_BLOCK[0]
    """Rows of a weight in block FP8 that share a row of its `weight_scale_inv`."""

    @classmethod
    def of_config(cls, config: Any, tensor_parallel: int, expert_parallel: int = 1) -> "EngineShape":
        """From a Hugging Face config; families name the number of experts differently."""

        def first(*names: str) -> int:
            return next((value for name in names if (value := getattr(config, name, None))), 0)

        quantization: dict[str, Any] = getattr(config, "quantization_config", None) or {}
        # Without a GPU SGLang rounds widths up to what divides well among ranks, and keeps the model's own beside them.
        expert_width = first("original_moe_intermediate_size", "moe_intermediate_size")
        return cls(
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            num_experts=first("num_experts", "n_routed_experts", "num_local_experts"),
            vocab_size=config.vocab_size,
            tensor_parallel=tensor_parallel,
            expert_parallel=expert_parallel,
            q_latent=first("q_lora_rank"),
            kv_latent=first("kv_lora_rank") + first("qk_rope_head_dim"),
            expert_width=expert_width,
            shared_width=expert_width * first("n_shared_experts"),
            dense_width=first("original_intermediate_size", "intermediate_size"),
            tile_rows=(quantization.get("weight_block_size") or DEFAULT_BLOCK)[0],
        )

    @property
    def kv_replicas(self) -> int:
        """Ranks that hold the same key-value heads, where there are more ranks than heads."""
        return max(1, self.tensor_parallel // self.num_kv_heads)

    def expert_place(self, expert: int) -> tuple[int, range]:
        """(index in the parameters of the ranks that hold it, those ranks)."""
        experts, ranks = self.num_experts // self.expert_parallel, self.tensor_parallel // self.expert_parallel
        part, index = divmod(expert, experts)
        return index, range(part * ranks, (part + 1) * ranks)


@dataclass(frozen=True, kw_only=True)
class Holding:
    """What one rank of an engine has of a tensor: a shard, of which other ranks may have copies."""

    shard: int
    shards: int
    copy: int
    copies: int


@dataclass(frozen=True, kw_only=True)
class EngineSlice:
    """One Hugging Face tensor within an engine parameter."""

    hf_name: str
    expert: int | None = None
    """Index into the parameter's first dimension, on the ranks that hold it."""
    ranks: range | None = None
    """The engine's ranks that hold it or a shard of it; None for all."""
    part: tuple[int, int, int] | None = None
    """(first, end, of): which of `of` equal pieces of the rows, after the expert was taken."""
    shard_dim: int | None = None
    """Dimension over which these ranks split it; None where each holds the whole."""
    replicas: int = 1
    """Neighbouring ranks that hold the same shard."""
    size: int | None = None
    """Of the whole tensor along `shard_dim`, where the engine may pad it."""
    in_model_dtype: bool = False
    """It arrives in the precision of the embedding, though an engine may hold it in float32."""

    def holding(self, rank: int, tensor_parallel: int) -> Holding | None:
        """What a rank has of the tensor; None where that is nothing."""
        ranks = self.ranks or range(tensor_parallel)
        if rank not in ranks:
            return None
        copies = self.num_copies(tensor_parallel)
        shard, copy = divmod(rank - ranks.start, copies)
        return Holding(shard=shard, shards=len(ranks) // copies, copy=copy, copies=copies)

    def num_copies(self, tensor_parallel: int) -> int:
        """Ranks that have the same part of the tensor, or all of it."""
        return len(self.ranks or range(tensor_parallel)) if self.shard_dim is None else self.replicas

    def of(self, parameter: Tensor) -> Tensor:
        """The view of this rank's shard; the rank must hold one."""
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


def _qkv(match: re.Match[str], shape: EngineShape) -> list[EngineSlice]:
    path, suffix = match.groups()
    query_heads = shape.num_heads // shape.tensor_parallel
    kv_heads = max(1, shape.num_kv_heads // shape.tensor_parallel)
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
            replicas=1 if name == "q" else shape.kv_replicas,
        )
        for name, (first, end) in bounds.items()
    ]


def _width(path: str, suffix: str, shape: EngineShape) -> int | None:
    """Inner columns of the MLP at a path; None for scales, which no engine pads."""
    if suffix == "weight_scale_inv":
        return None
    if ".experts" in path:
        return shape.expert_width or None
    return (shape.shared_width if path.endswith("shared_experts") else shape.dense_width) or None


def _gate_up(match: re.Match[str], shape: EngineShape) -> list[EngineSlice]:
    path, suffix = match.groups()
    size = _width(path, suffix, shape)
    return [
        EngineSlice(hf_name=f"{path}.{name}_proj.{suffix}", part=(half, half + 1, 2), shard_dim=0, size=size)
        for half, name in enumerate(("gate", "up"))
    ]


def _experts_gate_up(match: re.Match[str], shape: EngineShape) -> list[EngineSlice]:
    path, suffix = match.groups()
    return [
        EngineSlice(
            hf_name=f"{path}.{expert}.{name}_proj.{suffix}",
            expert=index,
            ranks=ranks,
            part=(half, half + 1, 2),
            shard_dim=0,
            size=_width(path, suffix, shape),
        )
        for expert in range(shape.num_experts)
        for index, ranks in [shape.expert_place(expert)]
        for half, name in enumerate(("gate", "up"))
    ]


def _experts_down(match: re.Match[str], shape: EngineShape) -> list[EngineSlice]:
    path, suffix = match.groups()
    size = _width(path, suffix, shape)
    return [
        EngineSlice(hf_name=f"{path}.{expert}.down_proj.{suffix}", expert=index, ranks=ranks, shard_dim=1, size=size)
        for expert in range(shape.num_experts)
        for index, ranks in [shape.expert_place(expert)]
    ]


def _latent_projections(match: re.Match[str], shape: EngineShape) -> list[EngineSlice]:
    """Scales of tiles are fused like the weights, each of the two with a tile of its own at the end."""
    path, suffix = match.groups()
    unit = shape.tile_rows if suffix == "weight_scale_inv" else 1
    query, key_value = -(-shape.q_latent // unit), -(-shape.kv_latent // unit)
    rows = query + key_value
    return [
        EngineSlice(hf_name=f"{path}.q_a_proj.{suffix}", part=(0, query, rows)),
        EngineSlice(hf_name=f"{path}.kv_a_proj_with_mqa.{suffix}", part=(query, rows, rows)),
    ]


def _rows(match: re.Match[str], shape: EngineShape) -> list[EngineSlice]:
    return [EngineSlice(hf_name=match.group(), shard_dim=0)]


def _columns(match: re.Match[str], shape: EngineShape) -> list[EngineSlice]:
    return [EngineSlice(hf_name=match.group(), shard_dim=1)]


def _down(match: re.Match[str], shape: EngineShape) -> list[EngineSlice]:
    return [EngineSlice(hf_name=match.group(), shard_dim=1, size=_width(match.group(1), match.group(2), shape))]


def _vocabulary(match: re.Match[str], shape: EngineShape) -> list[EngineSlice]:
    return [EngineSlice(hf_name=match.group(), shard_dim=0, size=shape.vocab_size)]


def _router(match: re.Match[str], shape: EngineShape) -> list[EngineSlice]:
    return [EngineSlice(hf_name=match.group(), in_model_dtype=True)]


_RULES: list[tuple[str, _Rule]] = [
    (rf"(.+\.self_attn)\.qkv_proj\.{_SUFFIX}", _qkv),
    (rf"(.+\.self_attn)\.fused_qkv_a_proj_with_mqa\.{_SUFFIX}", _latent_projections),
    (rf".+\.self_attn\.(q_proj|q_b_proj|kv_b_proj)\.{_SUFFIX}", _rows),
    (rf"(.+\.experts)\.w13_{_SUFFIX}", _experts_gate_up),
    (rf"(.+\.experts)\.w2_{_SUFFIX}", _experts_down),
    (rf"(.+)\.gate_up_proj\.{_SUFFIX}", _gate_up),
    (r".+\.o_proj\.(weight|weight_scale_inv)", _columns),
    (r"(.+)\.down_proj\.(weight|weight_scale_inv)", _down),
    (r".+\.mlp\.gate\.weight", _router),
    (r"(.+\.embed_tokens|lm_head)\.weight", _vocabulary),
]


def engine_slices(engine_name: str, shape: EngineShape) -> list[EngineSlice]:
    """The Hugging Face tensors that the engine's parameter of this name holds."""
    for pattern, rule in _RULES:
        if match := re.fullmatch(pattern, engine_name):
            return rule(match, shape)
    return [EngineSlice(hf_name=engine_name)]
