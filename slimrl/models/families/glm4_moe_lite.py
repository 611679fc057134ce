"""GLM-4.7-Flash: attention and experts of DeepSeek-V3, with positions that are not scaled."""

from typing import Any

from slimrl.config.hf_config import num_dense_layers
from slimrl.models.families.deepseek_v3 import megatron_config as megatron_config
from slimrl.models.families.deepseek_v3 import weight_map as weight_map


def unserved(hf_config: dict[str, Any]) -> str | None:
    """Why SGLang would not serve this config; None if it would. transformers 5 saves `mlp_layer_types` alone."""
    if hf_config.get("first_k_dense_replace") is not None:
        return None
    missing = f"first_k_dense_replace: {num_dense_layers(hf_config)}"
    return f"SGLang does not read mlp_layer_types of a glm4_moe_lite. Set {missing} in config.json too."
