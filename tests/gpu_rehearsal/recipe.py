"""What a rehearsal takes from a recipe: its model's config as published, and an environment for as long as it lasts."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from slimrl.config.wrapper import WRAPPED_IN
from slimrl.toys.toy_configs import TOYS, ToySize

TOY = TOYS["qwen3_moe"](ToySize(hidden=128, head_dim=64, moe_intermediate=128)) | {"vocab_size": 512}
"""Hugging Face config of the toy model of recipes/single_gpu, as docs/recipes.md has it made"""


def published(hf_config: dict[str, Any]) -> dict[str, Any]:
    """The config with the name of the model's class, which one around it names itself; the toy of the small recipes
    where the recipe names none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = hf_config or TOY
    if WRAPPED_IN in config:
        return config
    return {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config["model_type"]]], **config}


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
