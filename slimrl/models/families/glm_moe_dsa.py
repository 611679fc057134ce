"""GLM-5, 5.1 and 5.2: DeepSeek-V3.2 whose indexers rotate neighbouring dimensions in pairs."""

from typing import Any

from slimrl.config.hf_config import num_dense_layers
from slimrl.models.families.deepseek_v32 import megatron_config as megatron_config
from slimrl.models.families.deepseek_v32 import weight_map as weight_map
from slimrl.models.families.served_keys import unserved_without


def unserved(hf_config: dict[str, Any]) -> str | None:
    """Why SGLang would serve another model than this config describes; None if it would not."""
    experts = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    dense = num_dense_layers(hf_config)
    return unserved_without(hf_config, {"indexer_rope_interleave": True, "first_k_dense_replace": dense, **experts})
