"""DeepSeek-V3.2: DeepSeek-V3 whose queries attend to the keys that an indexer chooses (arXiv:2512.02556, section 2.1).

An indexer scores all earlier tokens of a query by a few small heads with one key each, and the `index_topk` best are
attended to. A layer without an indexer takes the choice of the layer before (arXiv:2603.12201).
"""

from typing import Any

from slimrl.models.families.deepseek_moe import moe_config, moe_weight_map
from slimrl.models.families.deepseek_v3 import unserved as unserved
from slimrl.models.families.mla import latent_attention_config, latent_attention_rules
from slimrl.models.families.mtp import num_mtp_layers
from slimrl.models.families.rules import LayerPrefix, all_layers
from slimrl.models.hf_config import required
from slimrl.models.megatron_config import MegatronModelConfig, decoder_config
from slimrl.models.weight_map import HfTensor, Rule, WeightMap

DEFAULT_OFFSET = 2
"""Layers at the beginning that have an indexer whatever the period, if config.json has no `index_skip_topk_offset`."""


def megatron_config(hf_config: dict[str, Any]) -> MegatronModelConfig:
    """Raises ValueError for routers, attention, positions and a schedule of indexers that Megatron does not have, and
    for a rotation of indexers that transformers does not have for the family."""
    return decoder_config(
        hf_config,
        {**latent_attention_config(hf_config), **moe_config(hf_config), **_indexer_config(hf_config)},
        multi_latent_attention=True,
        mtp_layers=num_mtp_layers(hf_config),
    )


def weight_map(hf_config: dict[str, Any], padded_vocab_size: int | None, *, mtp: bool = False) -> WeightMap:
    indexed = set(indexed_layers(hf_config))

    def attention(prefix: LayerPrefix) -> list[Rule]:
        layers = None if prefix.layers is None else tuple(layer for layer in prefix.layers if layer in indexed)
        with_indexer = LayerPrefix(megatron=prefix.megatron, hf=prefix.hf, layers=layers)
        return [*latent_attention_rules(hf_config, prefix), *_indexer_rules(hf_config, with_indexer)]

    return moe_weight_map(hf_config, padded_vocab_size, attention, mtp=mtp)


def indexed_layers(hf_config: dict[str, Any]) -> tuple[int, ...]:
    """Indices of the layers that have an indexer.

    Raises:
        ValueError: `indexer_types` or `index_topk_pattern` have not one value for each layer.
    """
    layers = all_layers(hf_config)
    kinds = hf_config.get("indexer_types") or hf_config.get("index_topk_pattern")
    if kinds and len(kinds) != len(layers):
        raise ValueError(f"config.json: {len(kinds)} indexer_types or index_topk_pattern for {len(layers)} layers")
    if kinds:
        return tuple(layer for layer in layers if kinds[layer] in ("full", "F"))
    period, offset = hf_config.get("index_topk_freq") or 1, hf_config.get("index_skip_topk_offset")
    return _every(layers, period, DEFAULT_OFFSET if offset is None else offset)


def _indexer_config(hf_config: dict[str, Any]) -> dict[str, Any]:
    period, offset = _schedule(hf_config)
    kind, given = hf_config.get("model_type"), hf_config.get("indexer_rope_interleave")
    interleaved = kind == "glm_moe_dsa"
    if given not in (None, interleaved):
        raise ValueError(f"config.json: not supported for {kind}: indexer_rope_interleave: {given!r}")
    return {
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": int(required(hf_config, "index_n_heads")),
        "dsa_indexer_head_dim": int(required(hf_config, "index_head_dim")),
        "dsa_indexer_topk": int(required(hf_config, "index_topk")),
        "dsa_indexer_topk_freq": period,
        "dsa_indexer_skip_topk_offset": offset,
        "dsa_indexer_rope_interleaved": interleaved,
        # The same rotation of queries and keys leaves their products as they are.
        "dsa_indexer_rotate_activation": False,
        "dsa_indexer_k_norm_epsilon": 1e-6,
    }


def _indexer_rules(hf_config: dict[str, Any], prefix: LayerPrefix) -> list[Rule]:
    """An indexer, whole on every rank."""
    heads, dim = required(hf_config, "index_n_heads"), required(hf_config, "index_head_dim")
    hidden, latent = required(hf_config, "hidden_size"), required(hf_config, "q_lora_rank")
    megatron = prefix.megatron + "self_attention.core_attention.indexer."

    def rule(name: str, hf_name: str, shape: tuple[int, ...], *, quantizable: bool = False) -> Rule:
        return Rule(
            megatron=(megatron + name,),
            hf=(HfTensor(name=f"{prefix.hf}self_attn.indexer.{hf_name}", shape=shape),),
            layers=prefix.layers,
            quantizable=quantizable,
        )

    return [
        rule("linear_wq_b.weight", "wq_b.weight", (heads * dim, latent), quantizable=True),
        rule("linear_wk.weight", "wk.weight", (dim, hidden), quantizable=True),
        rule("k_norm.weight", "k_norm.weight", (dim,)),
        rule("k_norm.bias", "k_norm.bias", (dim,)),
        rule("linear_weights_proj.weight", "weights_proj.weight", (heads, hidden)),
    ]


def _schedule(hf_config: dict[str, Any]) -> tuple[int, int]:
    """(period, offset) of the layers with an indexer, as Megatron takes them.

    Raises:
        ValueError: `indexer_types` follow no such schedule.
    """
    layers, indexed = all_layers(hf_config), indexed_layers(hf_config)
    for period in range(1, len(layers) + 1):
        for offset in range(1, len(layers) + 1):
            if _every(layers, period, offset) == indexed:
                return period, offset
    raise ValueError(f"config.json: not supported for {hf_config.get('model_type')}: indexer_types have no period")


def _every(layers: tuple[int, ...], period: int, offset: int) -> tuple[int, ...]:
    return tuple(layer for layer in layers if max(layer + 1 - offset, 0) % period == 0)
