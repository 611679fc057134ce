"""DeepSeek's attention stays in the latent space on a CPU, in prefill as in decode.

The cache holds latents. For a prompt without a cached prefix SGLang expands them to keys and values of each head and
expects its backend to take those as they come; torch_native reads what it attends to from the cache.
"""

from typing import Any


def after_dispatch(method: Any, attention: Any, batch: Any) -> Any:
    """Hook of DeepseekV2AttentionMLA.dispatch_attn_forward_method; None leaves its choice."""
    from sglang.srt.models.deepseek_common.attention_forward_methods import AttnForwardMethod

    return AttnForwardMethod.MLA if method is AttnForwardMethod.MHA else None
