"""Fused kernels of Megatron's layers: on where their package is, off elsewhere, so that no recipe has to say."""

from megatron.core.models.common.embeddings import rope_utils
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.moe import moe_utils

from slimrl import device

PERMUTE_KERNELS = (
    "fused_permute",
    "fused_permute_with_probs",
    "fused_sort_chunks_by_index",
    "fused_sort_chunks_by_index_with_probs",
    "fused_unpermute",
)
"""Transformer Engine's kernels that sort tokens by expert; each is None where its version lacks them."""


def fusions(*, latent_attention: bool) -> dict[str, bool]:
    """Fields of TransformerConfig that ask for fused kernels.

    Args:
        latent_attention: of a model with it. Megatron calls its fused rotary positions experimental there, so they stay
            off.
    """
    engine = device.has_transformer_engine()
    return {
        "bias_activation_fusion": engine,
        "bias_dropout_fusion": engine,
        "masked_softmax_fusion": False,
        # Without it each micro-batch waits for the lengths of its sequences in each layer.
        "apply_rope_fusion": engine and not latent_attention and rope_utils.fused_apply_rotary_pos_emb_thd is not None,
        # Without it the number of tokens of each expert is read on the host.
        "moe_permute_fusion": engine and all(getattr(moe_utils, name) is not None for name in PERMUTE_KERNELS),
        # Weight gradients are added to the gradient buffer by the matrix product itself, a kernel of apex.
        "gradient_accumulation_fusion": device.device_type() == "cuda" and layers._grad_accum_fusion_available,
    }
