"""The norm of a gated delta net has the dtype of the engine's other weights.

SGLang makes it in the dtype that config.json names, so that an engine of another precision would round it to that, or
hold what no fingerprint of the trainer's equals.
"""

from typing import Any


def after_init(result: None, net: Any, *args: Any, **kwargs: Any) -> None:
    """Hook of Qwen3GatedDeltaNet.__init__, which SGLang calls with the model's dtype as torch's default."""
    import torch

    net.norm.to(torch.get_default_dtype())
