"""Weights that SGLang makes in the dtype that config.json names have the dtype of the engine's other weights.

An engine of another precision would round them to that, or hold what no fingerprint of the trainer's equals; of gpt-oss
it would serve nothing.
"""

from typing import Any


def after_init(result: None, net: Any, *args: Any, **kwargs: Any) -> None:
    """Hook of Qwen3GatedDeltaNet.__init__, which SGLang calls with the model's dtype as torch's default."""
    import torch

    net.norm.to(torch.get_default_dtype())


def before_gpt_oss(model: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    """Hook of GptOssModel.__init__, called in the same way."""
    import torch

    config.dtype = torch.get_default_dtype()
