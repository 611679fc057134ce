"""Layers for multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2), as DeepSeek and GLM-4.5 have them.

Layer i predicts one token further ahead. It norms the embedding of the next token (`enorm`) and the hidden states of
the layer before (`hnorm`), and concatenates the two, in this order in both formats. `eh_proj` projects them back to the
hidden size; a layer of the model's kind and a norm of its own follow. Hugging Face numbers these layers after the
model's own, and repeats the model's embedding and output layer in each.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from slimrl.models.families.rules import LayerPrefix
from slimrl.models.hf_config import required
from slimrl.models.weight_map import HfTensor, Rule, Shard

MTP_KEYS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Keys of config.json with the number of these layers."""


@dataclass(frozen=True, kw_only=True)
class DraftModel:
    """SGLang's model of a layer for multi-token prediction."""

    model_class: str
    layer_name: Callable[[str, Any], str]
    """Function of a parameter's name and of the config that gives the name in an engine's model with that layer"""


def numbered_layer_name(name: str, config: Any) -> str:
    """The name in a layer that is numbered after the model's own."""
    return re.sub(r"^model\.(decoder\.)?", f"model.layers.{config.num_hidden_layers}.", name)


def num_mtp_layers(hf_config: dict[str, Any], default: int = 0) -> int:
    """Number of MTP layers as the config says, or `default` if it says nothing; the checkpoint may lack them all the
    same."""
    given = map(hf_config.get, MTP_KEYS)
    return next((int(number) for number in given if number is not None), default)


def embedding_copies(hf_config: dict[str, Any]) -> tuple[str, ...]:
    """Names under which the layers repeat the embedding, and the output layer if it is tied to the embedding."""
    names = tuple(f"{prefix}embed_tokens.weight" for prefix in _hf_prefixes(hf_config))
    return names + head_copies(hf_config) if hf_config.get("tie_word_embeddings") else names


def head_copies(hf_config: dict[str, Any]) -> tuple[str, ...]:
    """Names under which the layers repeat the output layer."""
    return tuple(f"{prefix}shared_head.head.weight" for prefix in _hf_prefixes(hf_config))


def mtp_rules(
    hf_config: dict[str, Any], layer_rules: Callable[[LayerPrefix], list[Rule]], *, final_norm: str
) -> list[Rule]:
    """Rules of all layers for multi-token prediction.

    Args:
        layer_rules: gives those of one of the model's own layers.
        final_norm: what Hugging Face calls the last norm of each.
    """
    hidden = required(hf_config, "hidden_size")
    rules: list[Rule] = []
    for index, hf in enumerate(_hf_prefixes(hf_config)):
        names = {name: hf + name for name in ("enorm", "hnorm", "eh_proj")}
        names["final_layernorm"] = hf + final_norm
        rules += mtp_layer_rules(hidden, index, names, layer_rules, layer_prefix=hf)
    return rules


def mtp_layer_rules(
    hidden: int,
    index: int,
    hf_names: Mapping[str, str],
    layer_rules: Callable[[LayerPrefix], list[Rule]],
    *,
    layer_prefix: str,
) -> list[Rule]:
    """Rules of one layer for multi-token prediction.

    Args:
        hf_names: Hugging Face names of `enorm`, `hnorm`, `eh_proj` and `final_layernorm`, without `.weight`.
        layer_rules: gives those of one of the model's own layers.
        layer_prefix: of the Hugging Face names of that layer.
    """
    outer = f"mtp.layers.{index}."
    inner = LayerPrefix(megatron=outer + "mtp_model_layer.", hf=layer_prefix, layers=None)
    weights = {name: f"{hf}.weight" for name, hf in hf_names.items()}

    def norm(name: str) -> Rule:
        return Rule(megatron=(f"{outer}{name}.weight",), hf=(HfTensor(name=weights[name], shape=(hidden,)),))

    rules = [
        norm("enorm"),
        norm("hnorm"),
        Rule(
            megatron=(outer + "eh_proj.weight",),
            hf=(HfTensor(name=weights["eh_proj"], shape=(hidden, 2 * hidden)),),
            shard=Shard(dim=0),
        ),
        *layer_rules(inner),
        norm("final_layernorm"),
    ]
    return [replace(rule, mtp=True) for rule in rules]


def _hf_prefixes(hf_config: dict[str, Any]) -> list[str]:
    first = int(required(hf_config, "num_hidden_layers"))
    return [f"model.layers.{first + index}." for index in range(num_mtp_layers(hf_config))]
