"""A Hugging Face tensor's place in a parameter of a loaded SGLang model, which fuses and shards them."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slimrl.config.wrapper import family_type
from slimrl.data.boxes import Box
from slimrl.models.hf_config import FP8_BLOCK

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class EngineShape:
    """The sizes on which fused parameters depend."""

    model_type: str = ""
    """The model's family by its config.json"""
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
        """The shape that a Hugging Face config gives; families name the number of experts differently.

        Args:
            config: of the model, or of one that wraps it.
        """
        config = getattr(config, "text_config", None) or config

        def first(*names: str) -> int:
            return next((value for name in names if (value := getattr(config, name, None))), 0)

        quantization: dict[str, Any] = getattr(config, "quantization_config", None) or {}
        # On a CPU SGLang pads widths so that they divide among ranks, and keeps the original ones next to them.
        dense_width = first("original_intermediate_size", "intermediate_size")
        expert_width = first("original_moe_intermediate_size", "moe_intermediate_size") or dense_width
        keys = first("linear_num_key_heads") * first("linear_key_head_dim")
        values = first("linear_num_value_heads") * first("linear_value_head_dim")
        return cls(
            model_type=family_type(getattr(config, "model_type", "")),
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
            shared_width=expert_width * first("n_shared_experts", "num_shared_experts")
            or first("original_shared_expert_intermediate_size", "shared_expert_intermediate_size"),
            dense_width=dense_width,
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

    def box(self, shard: "Tensor", held: Holding) -> Box:
        """The region of the whole tensor that a rank's shard holds, without padding.

        Args:
            shard: what `of` gives.
        """
        edges = [(0, size) for size in shard.shape]
        if not edges:
            return ()
        if self.shard_dim is not None:
            size = shard.shape[self.shard_dim]
            stop = (held.shard + 1) * size
            edges[self.shard_dim] = (held.shard * size, stop if self.size is None else min(stop, self.size))
        start, stop = edges[0]
        edges[0] = (start + self.first_row, stop + self.first_row)
        return tuple((start, max(start, stop)) for start, stop in edges)

    def of(self, parameter: "Tensor") -> "Tensor":
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


@dataclass(frozen=True, kw_only=True)
class EngineRule:
    """What parameters of some names hold."""

    pattern: str
    """Regular expression of whole names in the engine"""
    slices: Callable[[re.Match[str], EngineShape], list[EngineSlice]]
    """Function of the match that gives the Hugging Face tensors in the parameter"""
    attention: bool = False
    """Whether SGLang shards it among the ranks that share requests: attention and the embedding"""
