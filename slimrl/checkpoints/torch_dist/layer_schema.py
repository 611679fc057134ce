"""The chunks of a torch_dist checkpoint in which every layer and expert has keys of its own, without Megatron.

slimrl's runs and its converter write such checkpoints. Megatron's import takes seconds, most of a conversion's start;
the tests compare this schema with the one that Megatron's own modules give (trainer/checkpointing/shard_schema.py).

1. A tensor's key is its name in Megatron's local layers, but that experts and layers for multi-token prediction have
   other prefixes, and a norm before a linear layer is stored as if it were fused into it.
2. A tensor of several parts is stored part by part: gate and up, and the parts of a gated delta net's input.
3. Each linear layer that is sharded has an empty object for the state of its quantisation.
"""

from collections.abc import Iterator
from typing import Any

from slimrl.checkpoints.torch_dist.chunks import Chunk, ShardSchema
from slimrl.config.alignment import round_up
from slimrl.models.family import family_of
from slimrl.models.weight_map import Entry

FUSED_NORM = ".layer_norm_weight"


def layer_schema(
    hf_config: dict[str, Any], *, tensor: int = 1, expert_tensor: int = 1, mtp: bool = False
) -> ShardSchema:
    """The content of a checkpoint with these sizes of tensor and expert tensor parallelism.

    Args:
        mtp: with the model's layers for multi-token prediction.

    Raises:
        ValueError: the model is not supported, or these sizes do not divide it.
    """
    family = family_of(hf_config)
    model = family.megatron_config(hf_config)
    weight_map = family.weight_map(hf_config, round_up(model.vocab_size, tensor), mtp=mtp)
    if expert_tensor > 1 and any(rule.num_experts and rule.shard is None for rule in weight_map.rules):
        raise ValueError(f"expert tensor parallelism {expert_tensor}: megatron-core shards no experts that have biases")
    sizes = {"tensor": tensor, "expert_tensor": expert_tensor}
    chunks: list[Chunk] = []
    objects = []
    for index, entry in enumerate(weight_map.entries):
        key = _key(entry, fused_norms=not model.multi_latent_attention)
        count = sizes[entry.rule.shard.group] if entry.rule.shard else 1
        chunks += (chunk for shard in range(count) for chunk in _shard_chunks(index, entry, key, shard, count))
        if entry.rule.shard and (entry.rule.quantizable or key.endswith(".eh_proj.weight")):
            objects.append(f"{key.removesuffix('.weight')}._extra_state/shard_0_1")
    return ShardSchema(weight_map=weight_map, chunks=tuple(chunks), objects=tuple(sorted(objects)))


def _key(entry: Entry, *, fused_norms: bool) -> str:
    """`fused_norms`: norms are stored as Transformer Engine fuses them; Megatron does not with latent attention."""
    local, engine = entry.megatron[0], entry.megatron[-1]
    name = engine if fused_norms and engine.endswith(FUSED_NORM) else local
    return name.replace(".local_experts.", ".experts.").replace(".mtp_model_layer.", ".transformer_layer.")


def _shard_chunks(index: int, entry: Entry, key: str, shard: int, count: int) -> Iterator[Chunk]:
    """The chunks of one shard, in the order in which they lie in it."""
    dim = entry.rule.shard.dim if entry.rule.shard else 0
    first = 0
    for part, rows in _parts(entry).items():
        whole = (rows, *entry.hf[0].shape[1:])
        if whole[dim] % count:
            raise ValueError(f"{key}{part}: dimension {dim} of {whole[dim]} does not divide over {count} ranks")
        size = whole[dim] // count
        shape = (*whole[:dim], size, *whole[dim + 1 :])
        yield Chunk(
            entry=index,
            shard=shard,
            num_shards=count,
            slices=(slice(first, first + shape[0]), *(slice(0, size) for size in shape[1:])),
            key=key + part,
            global_shape=whole,
            offset=tuple(shard * size if axis == dim else 0 for axis in range(len(whole))),
        )
        first += shape[0]


def _parts(entry: Entry) -> dict[str, int]:
    """Suffix of the key -> rows of the stored tensor."""
    shard = entry.rule.shard
    if shard and shard.padded_size:
        return {"": shard.padded_size}
    return entry.rule.op.stored_parts(entry.rule.hf)
