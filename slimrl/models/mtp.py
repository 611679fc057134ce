"""Layers for multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2), as DeepSeek and GLM-4.5 have them.

Layer i predicts one token more: it norms the embedding of the next token (`enorm`) and the hidden states below
(`hnorm`), projects the two side by side, in this order on both sides, back to the hidden size (`eh_proj`), and passes a
layer of the model's kind and a norm of its own. Hugging Face counts it on behind the trunk's layers, and repeats in it
the embedding and the output layer, which are the trunk's.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from slimrl.models.hf_config import required
from slimrl.models.rules import Block, norm_rule
from slimrl.models.weight_map import HfTensor, Rule, Shard


def num_mtp_layers(hf_config: dict[str, Any]) -> int:
    """How many such layers the config names; a checkpoint may lack them all the same."""
    given = (hf_config.get(name) for name in ("num_nextn_predict_layers", "num_mtp_layers"))
    return next((int(number) for number in given if number is not None), 0)


def embedding_copies(hf_config: dict[str, Any]) -> tuple[str, ...]:
    """Names under which the layers repeat the embedding, and the output layer where that is the embedding."""
    names = tuple(f"{prefix}embed_tokens.weight" for prefix in _hf_prefixes(hf_config))
    return names + head_copies(hf_config) if hf_config.get("tie_word_embeddings") else names


def head_copies(hf_config: dict[str, Any]) -> tuple[str, ...]:
    """Names under which the layers repeat the output layer."""
    return tuple(f"{prefix}shared_head.head.weight" for prefix in _hf_prefixes(hf_config))


def mtp_rules(hf_config: dict[str, Any], layer_rules: Callable[[Block], list[Rule]]) -> list[Rule]:
    """Of all layers for multi-token prediction; `layer_rules` gives those of the model's layer with experts."""
    hidden = required(hf_config, "hidden_size")
    rules: list[Rule] = []
    for index, prefix in enumerate(_hf_prefixes(hf_config)):
        outer = Block(megatron=f"mtp.layers.{index}.", hf=prefix, layers=None)
        inner = Block(megatron=f"mtp.layers.{index}.transformer_layer.", hf=prefix, layers=None)
        rules += [
            norm_rule((outer.megatron + "enorm.weight",), prefix + "enorm.weight", hidden, outer),
            norm_rule((outer.megatron + "hnorm.weight",), prefix + "hnorm.weight", hidden, outer),
            Rule(
                megatron=(outer.megatron + "eh_proj.weight",),
                hf=(HfTensor(name=prefix + "eh_proj.weight", shape=(hidden, 2 * hidden)),),
                shard=Shard(dim=0),
            ),
            *layer_rules(inner),
            norm_rule((outer.megatron + "final_layernorm.weight",), prefix + "shared_head.norm.weight", hidden, outer),
        ]
    return [replace(rule, mtp=True) for rule in rules]


def _hf_prefixes(hf_config: dict[str, Any]) -> list[str]:
    trunk = int(required(hf_config, "num_hidden_layers"))
    return [f"model.layers.{trunk + index}." for index in range(num_mtp_layers(hf_config))]
