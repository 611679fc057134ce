"""The model that a config.json describes, without how its file is stored, so that two can be compared."""

from typing import Any

from slimrl.config.wrapper import WRAPPED_IN
from slimrl.models.architecture import architecture_of

STORAGE_KEYS = ("_name_or_path", "architectures", "dtype", "quantization_config", "torch_dtype", "transformers_version")
"""Keys of config.json that do not change what the model computes."""


def model_facts(hf_config: dict[str, Any]) -> dict[str, Any]:
    """Megatron's settings; config.json's keys if the family is not supported."""
    try:
        return architecture_of(hf_config)
    except ValueError:
        return {name: value for name, value in hf_config.items() if name not in (*STORAGE_KEYS, WRAPPED_IN)}


def different_facts(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """A line for every difference between the models of two config.json."""
    facts_a, facts_b = model_facts(a), model_facts(b)
    return [
        f"{name}: {facts_a.get(name)} and {facts_b.get(name)}"
        for name in sorted({*facts_a, *facts_b})
        if facts_a.get(name) != facts_b.get(name)
    ]
