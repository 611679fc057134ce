"""What a family tells the trainer about a model, in Megatron's terms and in plain values."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class MegatronModelConfig:
    transformer: dict[str, Any]
    """Keyword arguments of TransformerConfig (MLATransformerConfig with `multi_latent_attention`): the architecture
    alone, no layout and no precision. `activation_func` is a name in torch.nn.functional."""
    multi_latent_attention: bool
    vocab_size: int
    """Rows of the Hugging Face embedding, without padding."""
    rotary_base: float
    rotary_percent: float
    tie_embeddings: bool
    max_position: int
    """Longest position that the model was made for, in tokens."""
