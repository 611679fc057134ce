"""Reads a torch_dist checkpoint of Megatron as Hugging Face tensors."""

import re
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from slimrl.checkpoints.torch_dist.chunks import ShardSchema
from slimrl.checkpoints.torch_dist.layer_schema import layer_schema
from slimrl.checkpoints.torch_dist.metadata import content_metadata
from slimrl.checkpoints.torch_dist.reader import StoredWeights
from slimrl.checkpoints.torch_dist.safe_pickle import read_metadata


class TorchDistCheckpoint(StoredWeights):
    """The model's weights in a folder that Megatron or the converter wrote, under any layout.

    Implements CheckpointReader. Must be constructed outside a real process group. If the layers for multi-token
    prediction are all absent, `specs` leaves them out.

    Args:
        hf_config: of the saved model.

    Raises:
        ValueError: not such a folder, a file is missing or truncated, or the weights are of another model.
    """

    def __init__(self, path: Path, hf_config: dict[str, Any]) -> None:
        metadata = read_metadata(path)
        super().__init__(path, metadata, schema_of_stored(path, metadata, hf_config))


def schema_of_stored(path: Path, metadata: Metadata, hf_config: dict[str, Any]) -> ShardSchema:
    """The schema of this checkpoint for one rank with the whole model.

    Raises:
        ValueError: not a checkpoint of megatron-core, or the model is not supported.
    """
    mtp = any(key.startswith("mtp.") for key in metadata.state_dict_metadata)
    if content_metadata(path, metadata).get("singleton_local_shards", False):
        return layer_schema(hf_config, mtp=mtp)
    # Imports Megatron, which takes seconds and tells how the layers and experts of such a checkpoint share keys.
    from slimrl.trainer.checkpointing.shard_schema import shard_schema

    alike = layers_share_keys(metadata)
    return shard_schema(hf_config, mtp=mtp, singleton_local_shards=False, layers_alike=alike)


def layers_share_keys(metadata: Metadata) -> bool:
    """Whether the layers are stored as one tensor of each name, `decoder.layers.mlp...`, or each by itself.

    Megatron decides it by its configuration (a list of layers with experts, `non_homogeneous_layers`), which a
    checkpoint need not hold; its keys tell.
    """
    return any(re.match(r"decoder\.layers\.\D", key) for key in metadata.state_dict_metadata)
