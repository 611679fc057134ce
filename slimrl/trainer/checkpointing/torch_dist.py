"""Reads a torch_dist checkpoint of Megatron as Hugging Face tensors."""

from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from slimrl.checkpoints.torch_dist.chunks import ShardSchema
from slimrl.checkpoints.torch_dist.reader import StoredWeights, read_metadata
from slimrl.trainer.checkpointing.shard_schema import shard_schema
from slimrl.trainer.checkpointing.torch_dist_metadata import content_metadata


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
    return shard_schema(
        hf_config,
        mtp=any(key.startswith("mtp.") for key in metadata.state_dict_metadata),
        singleton_local_shards=bool(content_metadata(path).get("singleton_local_shards", False)),
    )
