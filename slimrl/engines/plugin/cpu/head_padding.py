"""Attention heads without the padding that SGLang adds on a CPU.

It pads them to a multiple of all ranks of an engine: also where only the ranks of a group share them, or where ranks
are to hold copies of key-value heads as on a GPU. Recipes have sizes that need no padding (config/model_rules.py), and
padded weights are not where `models/engine_rules.py` says.
"""

from collections.abc import Callable
from typing import Any

_HEADS = ("num_attention_heads", "num_key_value_heads")
_LINEAR = ("linear_num_key_heads", "linear_num_value_heads")


def around_adjust_config(original: Callable[..., Any], model_config: Any, load_config: Any, num_ranks: int) -> Any:
    """Hook of adjust_config_with_unaligned_cpu_tp, which pads the columns of MLPs too."""
    configs = (model_config, model_config.hf_config, model_config.hf_text_config)
    heads = [{name: getattr(config, name) for name in _HEADS if hasattr(config, name)} for config in configs]
    adjusted = original(model_config, load_config, num_ranks)
    for config, numbers in zip(configs, heads, strict=True):
        vars(config).update(numbers)
        # Where the layers look on a CPU.
        vars(config).update({f"{name}_cpu": getattr(config, name) for name in _LINEAR if hasattr(config, name)})
    return adjusted
