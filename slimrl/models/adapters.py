"""The tensors of LoRA adapters (arXiv:2106.09685), as a weight map: their names, shapes and shards. Torch-free.

A linear layer W [out, in] of Hugging Face's model gets A [rank, in] and B [out, rank], and computes
W x + alpha / rank * B A x. A tensor of Megatron that holds several of these layers (q, k and v; gate and up) has an A
and a B for each, so adapters are those of PEFT, one by one. Where W is sharded by rows B is too, where by columns A.
"""

from collections.abc import Collection, Iterator
from dataclasses import replace

from slimrl.config.wrapper import Wrapper
from slimrl.models.weight_map import HfTensor, Rule, WeightMap

ADAPTERS = "adapters"
"""Name of the module, in a linear layer of Megatron, that holds its adapters."""

PEFT_PREFIX = "base_model.model."
"""Prefix of each name in a file of PEFT."""


def is_adapter(megatron_name: str) -> bool:
    return f".{ADAPTERS}." in megatron_name


def layer_name(tensor: HfTensor) -> str:
    """`q_proj` of `model.layers.0.self_attn.q_proj.weight`."""
    return tensor.name.removesuffix(".weight").rpartition(".")[2]


def adapted_tensors(rule: Rule, targets: Collection[str]) -> tuple[HfTensor, ...]:
    """The Hugging Face tensors of a rule that get adapters: linear layers of the model itself."""
    if not rule.quantizable or rule.mtp:
        return ()
    return tuple(tensor for tensor in rule.hf if tensor.name.endswith(".weight") and layer_name(tensor) in targets)


def adapter_map(
    weight_map: WeightMap, targets: Collection[str], rank: int, wrapper: Wrapper | None = None
) -> WeightMap:
    """The adapters of a model, in the order of its weights, A before B, under the names that PEFT gives them.

    Args:
        targets: names of linear layers, from `adapter_targets`.
        wrapper: kind of the wrapped model whose text model this is; PEFT finds its layers by the checkpoint's names.
    """
    return WeightMap(
        [
            adapter
            for rule in weight_map.rules
            for tensor in adapted_tensors(rule, targets)
            for adapter in _adapter_rules(rule, tensor, rank, wrapper)
        ]
    )


def _adapter_rules(rule: Rule, tensor: HfTensor, rank: int, wrapper: Wrapper | None) -> Iterator[Rule]:
    rows, columns = tensor.shape
    layer = tensor.name.removesuffix(".weight")
    if wrapper is not None:
        layer = wrapper.stored_name(layer)
    dim = None if rule.shard is None else rule.shard.dim
    for letter, shape, sharded in (("A", (rank, columns), dim == 1), ("B", (rows, rank), dim == 0)):
        yield Rule(
            megatron=tuple(
                f"{name.removesuffix('weight')}{ADAPTERS}.{layer_name(tensor)}_{letter}"
                for name in rule.megatron
                if name.endswith(".weight")
            ),
            hf=(HfTensor(name=f"{PEFT_PREFIX}{layer}.lora_{letter}.weight", shape=shape),),
            shard=None if not sharded or rule.shard is None else replace(rule.shard, padded_size=None),
            layers=rule.layers,
            num_experts=rule.num_experts,
        )
