"""Model families: how a Hugging Face config becomes a Megatron model, and which weights it has."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slimrl.data.protocols import TensorSpec
from slimrl.models import deepseek_v3, glm4_moe, llama, qwen2, qwen3, qwen3_moe
from slimrl.models.hf_config import dtype_name
from slimrl.models.megatron_config import MegatronModelConfig
from slimrl.models.weight_map import WeightMap


@dataclass(frozen=True, kw_only=True)
class Family:
    name: str
    model_types: tuple[str, ...]
    """Values of `model_type` in config.json."""
    megatron_config: Callable[[dict[str, Any]], MegatronModelConfig]
    """Of a Hugging Face config. Raises ValueError naming what of the config is not supported."""
    _weight_map: Callable[..., WeightMap]
    """Of a Hugging Face config and the padded vocabulary, and of `mtp` where the family has such layers."""
    has_mtp: bool = False
    """Whether its models may have layers for multi-token prediction."""

    def weight_map(
        self, hf_config: dict[str, Any], padded_vocab_size: int | None = None, *, mtp: bool = False
    ) -> WeightMap:
        """The table of weights.

        Args:
            padded_vocab_size: rows of the vocabulary in Megatron; None for as many as in Hugging Face's checkpoint.
            mtp: with the layers for multi-token prediction, where the model has such; training leaves them out.
        """
        if self.has_mtp:
            return self._weight_map(hf_config, padded_vocab_size, mtp=mtp)
        return self._weight_map(hf_config, padded_vocab_size)

    def hf_tensor_specs(self, hf_config: dict[str, Any], *, mtp: bool = False) -> list[TensorSpec]:
        """Every tensor of the checkpoint in export order, in the checkpoint's dtype."""
        return self.weight_map(hf_config, mtp=mtp).specs(dtype_name(hf_config))


FAMILIES = (
    Family(
        name="qwen3",
        model_types=("qwen3",),
        megatron_config=qwen3.megatron_config,
        _weight_map=qwen3.weight_map,
    ),
    Family(
        name="qwen3_moe",
        model_types=("qwen3_moe",),
        megatron_config=qwen3_moe.megatron_config,
        _weight_map=qwen3_moe.weight_map,
    ),
    Family(
        name="qwen2",
        model_types=("qwen2",),
        megatron_config=qwen2.megatron_config,
        _weight_map=qwen2.weight_map,
    ),
    Family(
        name="llama",
        model_types=("llama",),
        megatron_config=llama.megatron_config,
        _weight_map=llama.weight_map,
    ),
    Family(
        name="glm4_moe",
        model_types=("glm4_moe",),
        megatron_config=glm4_moe.megatron_config,
        _weight_map=glm4_moe.weight_map,
        has_mtp=True,
    ),
    Family(
        name="deepseek_v3",
        model_types=("deepseek_v3", "kimi_k2"),
        megatron_config=deepseek_v3.megatron_config,
        _weight_map=deepseek_v3.weight_map,
        has_mtp=True,
    ),
)
"""One row per family; everything that depends on the family asks this table."""


UNSUPPORTED = {
    "qwen3_next": (
        "megatron-core has no packed sequences and no context parallelism in its linear attention (GatedDeltaNet), and "
        "training packs all sequences"
    ),
}
"""Values of `model_type` that users ask for, with what stands in the way."""


def family_of(hf_config: dict[str, Any]) -> Family:
    """The family of a config.

    Raises:
        ValueError: its `model_type` is missing, unknown, or known and out of reach.
    """
    model_type = hf_config.get("model_type")
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    if model_type in UNSUPPORTED:
        raise ValueError(f"config.json: model_type {model_type!r} is not supported: {UNSUPPORTED[model_type]}")
    known = ", ".join(sorted(name for family in FAMILIES for name in family.model_types))
    raise ValueError(f"config.json: model_type {model_type!r} is not supported; known: {known}")
