"""The draft model of GLM-4.7-Flash derives weights of latent attention again after a resync.

SGLang calls `post_load_weights` of a model without arguments where rows were copied into its parameters. DeepSeek-V3's
draft model then takes its one layer; that of glm4_moe_lite_nextn.py would look for the layers of the engine's model.
"""

from collections.abc import Callable, Iterable
from typing import Any


def around_post_load(
    original: Callable[..., None], model: Any, is_nextn: bool = True, weight_names: Iterable[str] | None = None
) -> None:
    """Hook of Glm4MoeLiteForCausalLMNextN.post_load_weights."""
    original(model, is_nextn=True, weight_names=weight_names)
