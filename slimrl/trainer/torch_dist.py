"""A torch_dist checkpoint of Megatron's read as Hugging Face tensors."""

from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from slimrl.models.shard_pieces import ShardSchema
from slimrl.models.torch_dist_reader import StoredWeights, read_metadata
from slimrl.trainer.shard_schema import shard_schema
from slimrl.trainer.torch_dist_metadata import content_metadata


class TorchDistCheckpoint(StoredWeights):
    """The model's weights in a folder that Megatron or the converter has written, under any layout.

    Implements CheckpointReader. Must be made outside a real process group. Layers for multi-token prediction may be
    absent as a whole; then `specs` lacks them.

    Args:
        hf_config: of the model that was saved.

    Raises:
        ValueError: not such a folder, a file is missing or cut short, or the weights are not those of this model.
    """

    def __init__(self, path: Path, hf_config: dict[str, Any]) -> None:
        metadata = read_metadata(path)
        super().__init__(path, metadata, schema_of_stored(path, metadata, hf_config))


def schema_of_stored(path: Path, metadata: Metadata, hf_config: dict[str, Any]) -> ShardSchema:
    """What one rank with the whole model would find in this checkpoint, by its keys.

    Raises:
        ValueError: not a checkpoint of megatron-core, or the model is not supported.
    """
    return shard_schema(
        hf_config,
        mtp=any(key.startswith("mtp.") for key in metadata.state_dict_metadata),
        singleton_local_shards=bool(content_metadata(path).get("singleton_local_shards", False)),
    )
