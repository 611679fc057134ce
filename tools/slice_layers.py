"""The first layers of a checkpoint as a smaller one of the same family, for smoke tests on few GPUs.

Tensors keep their names and bytes, quantised ones with their scales. Layers for multi-token prediction are left out:
they continue the last layer, which is not there any more.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from slimrl_tools.output_folder import source_files
from slimrl_tools.rewrite import Rewrite
from torch import Tensor

from slimrl.data.protocols import TensorSpec
from slimrl.models.checkpoint import check_tensors
from slimrl.models.checkpoint_reader import read_whole
from slimrl.models.family import family_of
from slimrl.models.fp8 import SCALE_SUFFIX
from slimrl.models.hf_checkpoint import open_hf_checkpoint
from slimrl.models.hf_config import read_hf_config, required
from slimrl.models.safetensors_folder import MAX_SHARD_BYTES, SafetensorsFolder

MTP_KEYS = ("num_nextn_predict_layers", "num_mtp_layers")

LAYER_COUNTS = ("first_k_dense_replace", "max_window_layers")
"""Keys of config.json that count layers from the first, and cannot exceed what is left."""

LAYER_LISTS = ("layer_types", "mlp_layer_types", "moe_layer_freq", "no_rope_layers")
"""Keys of config.json that may have an entry per layer."""

LAYER_INDICES = ("mlp_only_layers",)
"""Keys of config.json that list layers by index."""


def slicing(src: SafetensorsFolder, num_layers: int, shard_bytes: int = MAX_SHARD_BYTES) -> Rewrite:
    """How the first `num_layers` layers are written, with embedding, last norm and head.

    Args:
        src: a Hugging Face checkpoint, plain or in block FP8, which stays open until the slice is written.

    Raises:
        ValueError: there are not as many layers, or the checkpoint is of no supported family, or not what its config
            says.
    """
    config = read_hf_config(src.path)
    family = family_of(config)
    with open_hf_checkpoint(src.path) as reader:
        check_tensors(reader, family, config)
    sliced = sliced_config(config, num_layers)
    kept = [name for tensor in family.weight_map(sliced).hf_tensors for name in (tensor, tensor + SCALE_SUFFIX)]
    specs = [src.specs[name] for name in kept if name in src.specs]

    def produce(group: Sequence[TensorSpec]) -> Iterator[tuple[str, Tensor]]:
        return ((spec.name, read_whole(src, spec.name)) for spec in group)

    return Rewrite(
        title="slice",
        src=src.path,
        specs=specs,
        produce=produce,
        config=sliced,
        job={
            "command": "slice-layers",
            "source": str(src.path.resolve()),
            "files": source_files(src.path),
            "layers": num_layers,
            "shard": shard_bytes,
        },
        max_shard_bytes=shard_bytes,
    )


def sliced_config(hf_config: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """config.json of the first `num_layers` layers: their number, and whatever says something layer by layer.

    Raises:
        ValueError: there are not as many.
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
