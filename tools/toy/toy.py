"""Small random checkpoints with a real tokenizer, in the Hugging Face format, for quickstarts and tests.

Weights are drawn tensor by tensor by the family's weight map: the same seed gives the same file, and every family can
have a toy.
"""

from itertools import chain
from pathlib import Path

import torch
from slimrl_tools.toy.toy_configs import ToySize, toy_config
from slimrl_tools.toy.toy_tokenizer import build_tokenizer

from slimrl.base.atomic import atomic_folder
from slimrl.checkpoints.safetensors_folder import write_safetensors
from slimrl.checkpoints.stacked_experts import stacks_of
from slimrl.config.wrapper import wrapper_of
from slimrl.models.family import family_of
from slimrl.models.hf_config import write_hf_config
from slimrl.toys.random_weights import random_tensors
from slimrl.toys.wrapped_toys import random_vision, toy_layout


def write_toy(family: str, out: Path, size: ToySize, seed: int, text: Path | None = None) -> int:
    """Write a random float32 checkpoint with tokenizer and chat template into a new folder, complete or not at all.

    Args:
        text: a file of a task whose words become tokens.

    Returns:
        Number of parameters, without copies; of a wrapped model those of its text model.

    Raises:
        ValueError: an unknown family, sizes that do not fit together, no such file, or `out` exists.
    """
    config = toy_config(family, size)
    if text is not None and not text.is_file():
        raise ValueError(f"{text}: no such file")
    with atomic_folder(out) as partial:
        tokenizer = build_tokenizer(() if text is None else text.read_text().splitlines())
        config |= {
            "vocab_size": len(tokenizer),
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        }
        weight_map = family_of(config).weight_map(config, mtp=True)
        specs, tensors = weight_map.specs("float32"), random_tensors(config, weight_map, size.init_std, seed)
        if wrapper_of(config) is not None:
            layout = toy_layout(config, specs)
            tensors = chain(layout.stored_tensors(specs, tensors), random_vision(layout, size.init_std, seed))
            specs = [*layout.stored_specs(specs), *layout.carried.values()]
        if weight_map.stacked:
            stacks = stacks_of(weight_map)
            specs, tensors = stacks.stored_specs(specs), stacks.stored_tensors(specs, tensors)
        write_safetensors(partial, specs, tensors)
        write_hf_config(partial, config)
        tokenizer.save_pretrained(partial)
    return sum(torch.Size(tensor.shape).numel() for tensor in weight_map.hf_tensors.values())
