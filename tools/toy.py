"""Small random checkpoints with a real tokenizer, in the Hugging Face format, for quickstarts and tests.

Weights are drawn tensor by tensor from the family's own list of names and shapes, so that the same seed gives the same
file, and every family with a weight map can have a toy.
"""

import json
from pathlib import Path

import torch
from slimrl_tools.toy_configs import ToySize, toy_config
from slimrl_tools.toy_tokenizer import build_tokenizer

from slimrl.models.family import family_of
from slimrl.models.random_weights import random_tensors
from slimrl.models.safetensors_folder import write_safetensors
from slimrl.models.whole_folder import whole_folder


def write_toy(family: str, out: Path, size: ToySize, seed: int) -> int:
    """Write a random float32 checkpoint with tokenizer and chat template into a new folder, complete or not at all.

    Returns:
        Number of parameters, tensors that the checkpoint repeats counted once.

    Raises:
        ValueError: an unknown family, sizes that do not fit together, or `out` exists.
    """
    config = toy_config(family, size)
    with whole_folder(out) as partial:
        tokenizer = build_tokenizer()
        config |= {
            "vocab_size": len(tokenizer),
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        }
        weight_map = family_of(config).weight_map(config, mtp=True)
        write_safetensors(partial, weight_map.specs("float32"), random_tensors(weight_map, size.init_std, seed))
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        tokenizer.save_pretrained(partial)
    return sum(torch.Size(tensor.shape).numel() for tensor in weight_map.hf_tensors.values())
