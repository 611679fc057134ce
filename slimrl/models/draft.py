"""What a resync sends to the draft model of an engine with speculative decoding."""

from typing import Any

from slimrl.data.model_weights import TensorSpec
from slimrl.models.family import family_of


def num_draft_layers(hf_config: dict[str, Any]) -> int:
    """Layers for multi-token prediction that the config describes."""
    weight_map = family_of(hf_config).weight_map(hf_config, mtp=True)
    return sum(name.endswith(".eh_proj.weight") for rule in weight_map.rules for name in rule.megatron)


def draft_specs(hf_config: dict[str, Any], dtype: str) -> list[TensorSpec]:
    """Tensors of the layers for multi-token prediction, without the embedding and the output layer.

    SGLang's draft models share those two with the engine's model, which has received them by then.

    Args:
        dtype: of tensors without one of their own.
    """
    weight_map = family_of(hf_config).weight_map(hf_config, mtp=True)
    return [spec for spec in weight_map.without_copies().specs(dtype) if spec.mtp]
