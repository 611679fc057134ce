"""DeepSeek's attention stays in the latent space on a CPU, in prefill as in decode.

The cache holds latents. For a prompt without a cached prefix SGLang expands them to keys and values of each head and
expects its backend to take those as they come; torch_native reads what it attends to from the cache.
For positions SGLang has DeepSeek-V3's scaling alone on a CPU, and Moonlight has none.
"""

from collections.abc import Callable
from typing import Any


def after_dispatch(method: Any, attention: Any, batch: Any) -> Any:
    """Hook of DeepseekV2AttentionMLA.dispatch_attn_forward_method; None leaves its choice."""
    from sglang.srt.models.deepseek_common.attention_forward_methods import AttnForwardMethod

    return AttnForwardMethod.MLA if method is AttnForwardMethod.MHA else None


def around_rope(
    original: Callable[..., Any],
    head_size: int,
    rotary_dim: int,
    max_position: int,
    base: int,
    is_neox_style: bool = True,
    rope_scaling: dict[str, Any] | None = None,
    dtype: Any = None,
    partial_rotary_factor: float = 1.0,
    device: str | None = None,
) -> Any:
    """Hook of get_rope_cpu: positions without scaling are made by the function of other devices."""
    from sglang.srt.layers.rotary_embedding.factory import get_rope

    arguments = (head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling, dtype, partial_rotary_factor)
    return original(*arguments, device) if rope_scaling else get_rope(*arguments)
