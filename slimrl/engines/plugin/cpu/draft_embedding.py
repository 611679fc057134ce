"""Hy3's draft model takes over its target's embedding and output layer, and then empties the cache of a GPU."""

from typing import Any

from torch import Tensor


def set_embed_and_head(draft: Any, embedding: Tensor, head: Tensor) -> None:
    """Replaces HYV3ForCausalLMNextN.set_embed_and_head."""
    draft.model.embed_tokens.weight, draft.lm_head.weight = embedding, head
