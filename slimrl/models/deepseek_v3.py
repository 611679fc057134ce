"""DeepSeek-V3, V3.1 and R1, Moonlight and Kimi-K2: multi-latent attention, then experts chosen by sigmoid scores."""

from typing import Any

from slimrl.models.megatron_config import MegatronModelConfig, decoder_config
from slimrl.models.mla import latent_attention_config, latent_attention_rules
from slimrl.models.mtp import embedding_copies, head_copies, mtp_rules, num_mtp_layers
from slimrl.models.rules import Block, all_layers, decoder, embedding_rule, head_rules, mlp_norm_rule, mlp_rules
from slimrl.models.sigmoid_moe import dense_layers, sigmoid_moe_config, sigmoid_moe_rules, sparse_layers
from slimrl.models.weight_map import Rule, WeightMap


def megatron_config(hf_config: dict[str, Any]) -> MegatronModelConfig:
    """Raises ValueError for routers, attention and positions that Megatron does not have."""
    return decoder_config(
        hf_config,
        {**latent_attention_config(hf_config), **sigmoid_moe_config(hf_config)},
        multi_latent_attention=True,
        mtp_layers=num_mtp_layers(hf_config),
    )


def weight_map(hf_config: dict[str, Any], padded_vocab_size: int | None, *, mtp: bool = False) -> WeightMap:
    def attention(block: Block) -> list[Rule]:
        return [*latent_attention_rules(hf_config, block), mlp_norm_rule(hf_config, block)]

    def sparse_layer_rules(block: Block) -> list[Rule]:
        return [*attention(block), *sigmoid_moe_rules(hf_config, block)]

    return WeightMap(
        [
            embedding_rule(hf_config, padded_vocab_size, embedding_copies(hf_config) if mtp else ()),
            *attention(decoder(all_layers(hf_config))),
            *mlp_rules(hf_config, decoder(dense_layers(hf_config))),
            *sigmoid_moe_rules(hf_config, decoder(sparse_layers(hf_config))),
            *head_rules(hf_config, padded_vocab_size, head_copies(hf_config) if mtp else ()),
            *(mtp_rules(hf_config, sparse_layer_rules) if mtp else ()),
        ]
    )
