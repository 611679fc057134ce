"""The first layers of a checkpoint as a smaller one of the same family, for smoke tests on few GPUs.

Tensors keep their names and bytes, quantised ones with their scales. Layers for multi-token prediction are left out,
since they follow the last layer.
"""

from typing import Any

from slimrl_tools.derive.rewrite import Rewrite

from slimrl.checkpoints.checkpoint_reader import read_whole
from slimrl.checkpoints.hf_check import check_tensors
from slimrl.checkpoints.hf_checkpoint import StoredFolder, open_hf_checkpoint
from slimrl.models.families.mtp import MTP_KEYS
from slimrl.models.family import family_of
from slimrl.models.hf_config import BLOCKS_SUFFIX, SCALES_SUFFIX, read_hf_config, required
from slimrl.quantization.fp8 import SCALE_SUFFIX

LAYER_COUNTS = ("first_k_dense_replace", "max_window_layers")
"""Keys of config.json that count layers from the first; at most the number of layers that are left."""

LAYER_LISTS = ("layer_types", "mlp_layer_types", "moe_layer_freq", "no_rope_layers")
"""Keys of config.json that may have an entry per layer."""

LAYER_INDICES = ("mlp_only_layers",)
"""Keys of config.json that list layers by index."""


def slicing(src: StoredFolder, num_layers: int) -> Rewrite:
    """The first `num_layers` layers, with embedding, final norm and head.

    Args:
        src: a Hugging Face checkpoint, plain or in block FP8, open until the slice is written.

    Raises:
        ValueError: the model has fewer layers, the family is not supported, or the tensors do not match the config.
    """
    config = read_hf_config(src.path)
    family = family_of(config)
    with open_hf_checkpoint(src.path) as reader:
        check_tensors(reader, family, config)
    sliced = sliced_config(config, num_layers)
    weight_map = family.weight_map(sliced)
    stored = dict.fromkeys(weight_map.stacked.get(name, (name, 0))[0] for name in weight_map.hf_tensors)
    suffixes = ("", SCALE_SUFFIX, BLOCKS_SUFFIX, SCALES_SUFFIX)
    specs = [src.specs[name + suffix] for name in stored for suffix in suffixes if name + suffix in src.specs]

    return Rewrite(
        command="slice-layers",
        sources=[src.path],
        specs=specs,
        produce=lambda group: ((spec.name, read_whole(src, spec.name)) for spec in group),
        config=sliced,
        form=src,
        options={"layers": num_layers},
    )


def sliced_config(hf_config: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """config.json of the first `num_layers` layers: their number, and all keys that refer to layers.

    Raises:
        ValueError: the model has fewer.
    """
    had = int(required(hf_config, "num_hidden_layers"))
    if not 1 <= num_layers <= had:
        raise ValueError(f"--layers {num_layers}: the model has {had}")
    sliced = {**hf_config, "num_hidden_layers": num_layers}
    for name, value in hf_config.items():
        if name in MTP_KEYS:
            sliced[name] = 0
        elif name in LAYER_COUNTS and value is not None:
            sliced[name] = min(value, num_layers)
        elif name in LAYER_LISTS and isinstance(value, list):
            sliced[name] = value[:num_layers]
        elif name in LAYER_INDICES and value is not None:
            sliced[name] = [layer for layer in value if layer < num_layers]
    return sliced
