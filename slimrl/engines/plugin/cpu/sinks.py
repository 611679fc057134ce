"""Sinks of attention on a CPU: a score of each head beside those of the tokens, of no value (gpt-oss).

SGLang's torch_native backend takes none, so SGLang refuses gpt-oss with it. The hooks here hand them past its methods
to batched_attention.py, which computes with them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

ATTRIBUTE = "slimrl_sinks"
"""Attribute of the backend: the sinks [H] of the layer that it computes, or None."""


def after_init(result: None, attention: Any, *args: Any, **kwargs: Any) -> None:
    """Hook of GptOssAttention.__init__: sinks in the dtype of the other weights, where SGLang has bfloat16 in any
    engine."""
    attention.sinks.data = attention.sinks.data.to(torch.get_default_dtype())


def around_forward(
    original: Callable[..., Tensor], backend: Any, *args: Any, sinks: Tensor | None = None, **kwargs: Any
) -> Tensor:
    """Hook of TorchNativeAttnBackend's forward_extend and forward_decode."""
    setattr(backend, ATTRIBUTE, sinks)
    try:
        return original(backend, *args, **kwargs)
    finally:
        setattr(backend, ATTRIBUTE, None)


def around_adjustments(original: Callable[..., None], server_args: Any) -> None:
    """Hook of handle_model_specific_adjustments, where SGLang refuses a model whose attention the backend does not
    compute: it gets the name of one that does."""
    from sglang.srt.arg_groups import model_hook

    backends_of = model_hook.attention_backends_of

    def named_otherwise(settings: Any) -> tuple[str, ...]:
        return tuple("triton" if name == "torch_native" else name for name in backends_of(settings))

    model_hook.attention_backends_of = named_otherwise
    try:
        original(server_args)
    finally:
        model_hook.attention_backends_of = backends_of


def with_sink(keys_BGLD: Tensor, values_BGLD: Tensor, visible: Tensor, sinks_GMN1: Tensor) -> tuple[Tensor, ...]:
    """Keys, values and an additive mask of the same attention with one more key, whose score is the sink.

    Args:
        visible: bool [B, N, L], the keys that each of N new tokens sees.
        sinks_GMN1: in the dtype of the queries, M query heads of each key head.

    Returns:
        Keys and values [B, G, L + 1, D], and the mask [B, G, M * N, L + 1].
    """
    heads, repeats, queries, _ = sinks_GMN1.shape
    scores = torch.zeros(visible.shape, dtype=sinks_GMN1.dtype).masked_fill_(~visible, -torch.inf)
    scores = scores[:, None, None].expand(-1, heads, repeats, -1, -1)
    sinks = sinks_GMN1.expand(len(visible), -1, -1, queries, 1)
    mask = torch.cat([scores, sinks], dim=-1).flatten(2, 3)
    pad = torch.nn.functional.pad
    return pad(keys_BGLD, (0, 0, 0, 1)), pad(values_BGLD, (0, 0, 0, 1)), mask
