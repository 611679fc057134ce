"""A random checkpoint of about a given size, for measurements.

Tensors have some MB each, as in real models, whatever the size of the whole: the width of the experts grows, or of the
MLP in a dense model.
"""

from pathlib import Path
from typing import Any

import torch

from slimrl.base.atomic import atomic_folder
from slimrl.checkpoints.safetensors_file import spec_bytes
from slimrl.checkpoints.safetensors_folder import write_safetensors
from slimrl.checkpoints.stacked_experts import stacks_of
from slimrl.config.alignment import round_up
from slimrl.config.schema.trainer import ParallelConfig
from slimrl.models.family import family_of
from slimrl.models.hf_config import write_hf_config
from slimrl.toys.random_weights import random_tensors
from slimrl.toys.toy_configs import TOYS, ToySize

VOCABULARY = 2048
LAYERS, EXPERTS, KV_HEADS = 4, 16, 4
"""Smallest numbers of layers, experts and key-value heads; rounded up so that the layout divides them."""
STEP = 32
"""Number of which the width is a multiple, as of the tensor-parallel sizes."""

_HIDDEN = ((0.2e9, 512), (4e9, 1024), (float("inf"), 2048))
"""Hidden sizes of models, each with the bytes below which a model has it"""


def sized_config(family: str, nbytes: int, dtype: str, parallel: ParallelConfig) -> dict[str, Any]:
    """config.json of a model whose tensors have about `nbytes` in total and which this layout divides.

    Args:
        dtype: of the weights, as torch prints it without the prefix.

    Raises:
        ValueError: an unknown family, or one whose smallest model is larger.
    """
    if family not in TOYS:
        raise ValueError(f"no toy of family {family!r}; known: {', '.join(TOYS)}")
    step = STEP * parallel.tensor * parallel.expert_tensor
    at_one, at_two = (tensor_bytes(_config(family, nbytes, dtype, parallel, steps * step)) for steps in (1, 2))
    if at_one > 1.5 * nbytes:
        raise ValueError(f"a {family} of {nbytes / 1e9:g} GB: the smallest has {at_one / 1e9:.3f} GB in {dtype}")
    steps = max(1, 1 + round((nbytes - at_one) / (at_two - at_one)))
    return _config(family, nbytes, dtype, parallel, steps * step)


def write_sized_toy(config: dict[str, Any], out: Path, seed: int) -> int:
    """Write random weights of a `sized_config` in its dtype, without a tokenizer, into a new folder.

    Returns:
        Bytes of the tensors.
    """
    dtype = config["dtype"]
    weight_map = family_of(config).weight_map(config)
    specs, stacks = weight_map.specs(dtype), stacks_of(weight_map)
    with atomic_folder(out) as partial:
        tensors = random_tensors(config, weight_map, config["initializer_range"], seed, getattr(torch, dtype))
        write_safetensors(partial, stacks.stored_specs(specs), stacks.stored_tensors(specs, tensors))
        write_hf_config(partial, config)
    return sum(map(spec_bytes, specs))


def _config(family: str, nbytes: int, dtype: str, parallel: ParallelConfig, width: int) -> dict[str, Any]:
    hidden = next(hidden for below, hidden in _HIDDEN if nbytes < below)
    stages = parallel.pipeline * (parallel.virtual_pipeline or 1)
    kv_heads = round_up(KV_HEADS, parallel.tensor)
    size = ToySize(
        layers=round_up(LAYERS, stages),
        hidden=hidden,
        heads=round_up(hidden // 64, kv_heads),
        kv_heads=kv_heads,
        head_dim=64,
        experts=round_up(EXPERTS, parallel.expert),
        moe_intermediate=width,
        init_std=0.02,
    )
    config = TOYS[family](size) | {"vocab_size": VOCABULARY, "dtype": dtype}
    if "moe_intermediate_size" not in config:
        config["intermediate_size"] = width
    return config | {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}


def tensor_bytes(config: dict[str, Any]) -> int:
    """Bytes of all tensors of the model."""
    return sum(map(spec_bytes, family_of(config).hf_tensor_specs(config)))
