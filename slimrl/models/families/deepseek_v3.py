"""DeepSeek-V3, V3.1 and R1, Moonlight and Kimi-K2: multi-latent attention, experts chosen by sigmoid scores."""

from typing import Any

from slimrl.config.hf_config import num_dense_layers
from slimrl.models.families.deepseek_moe import moe_config, moe_weight_map
from slimrl.models.families.mla import latent_attention_config, latent_attention_rules
from slimrl.models.families.mtp import num_mtp_layers
from slimrl.models.families.served_keys import unserved_without
from slimrl.models.megatron_config import MegatronModelConfig, decoder_config
from slimrl.models.weight_map import WeightMap


def megatron_config(hf_config: dict[str, Any]) -> MegatronModelConfig:
    """Raises ValueError for routers, attention and positions that Megatron does not have."""
    return decoder_config(
        hf_config,
        {**latent_attention_config(hf_config), **moe_config(hf_config)},
        multi_latent_attention=True,
        mtp_layers=num_mtp_layers(hf_config),
    )


def weight_map(hf_config: dict[str, Any], padded_vocab_size: int | None, *, mtp: bool = False) -> WeightMap:
    return moe_weight_map(
        hf_config, padded_vocab_size, lambda prefix: latent_attention_rules(hf_config, prefix), mtp=mtp
    )


def unserved(hf_config: dict[str, Any], **more: Any) -> str | None:
    """Why SGLang would not serve this config; None if it would.

    Args:
        more: what a family's config must have besides.
    """
    experts = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    return unserved_without(hf_config, {**more, "first_k_dense_replace": num_dense_layers(hf_config), **experts})
