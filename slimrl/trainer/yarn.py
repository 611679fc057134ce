"""Scaled positions (yarn) of models with grouped-query attention."""

from dataclasses import dataclass

from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class YarnConfig(TransformerConfig):
    """Has the attributes that models/gpt/gpt_model.py and transformer/attention.py read of their configuration for
    yarn, though megatron-core's own class has no such fields. Those of multi-latent attention have other names."""

    yarn_rotary_scaling_factor: float = 1.0
    yarn_original_max_position_embeddings: int = 4096
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_mscale: float | None = None
    """With None attention is scaled by the factor alone, as in transformers without `attention_factor`."""
    yarn_mscale_all_dim: float | None = None
    yarn_correction_range_round_to_int: bool = True
    """Whether the bounds between kept, mixed and stretched dimensions are rounded, `truncate` in transformers."""
