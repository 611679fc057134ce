"""The norm of a gated delta net has the dtype in which a trainer sends it, and gpt-oss that of its engine.

SGLang makes some weights in the dtype that config.json names, so that an engine of another precision would round them
to it, or hold what no fingerprint of the trainer's equals: the norm of Qwen3-Next, and what is no expert's of gpt-oss,
which such an engine would not serve. The norm of Qwen3.5 it makes in the engine's, and released files hold it in
float32.
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


def after_init_float32(result: None, net: Any, *args: Any, **kwargs: Any) -> None:
    """Hook of Qwen3_5GatedDeltaNet.__init__."""
    net.norm.float()
