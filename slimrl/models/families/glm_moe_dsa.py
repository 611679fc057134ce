"""GLM-5, 5.1 and 5.2: DeepSeek-V3.2 whose indexers rotate neighbouring dimensions in pairs."""

from typing import Any

from slimrl.models.families import deepseek_v3
from slimrl.models.families.deepseek_v32 import megatron_config as megatron_config
from slimrl.models.families.deepseek_v32 import weight_map as weight_map


def unserved(hf_config: dict[str, Any]) -> str | None:
    """Why SGLang would serve another model than this config describes; None if it would not."""
    return deepseek_v3.unserved(hf_config, indexer_rope_interleave=True)
