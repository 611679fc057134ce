"""A torch_dist checkpoint of Megatron's read as Hugging Face tensors."""

from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.metadata import Metadata

from slimrl.models.shard_pieces import ShardSchema
from slimrl.models.torch_dist_reader import StoredWeights, read_metadata
from slimrl.trainer.shard_schema import shard_schema


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
        singleton_local_shards=_singleton_local_shards(path),
    )


def _singleton_local_shards(path: Path) -> bool:
    """How the keys of layers and experts were made, from what the checkpoint says of itself."""
    try:
        content = dist_checkpointing.load_content_metadata(str(path))
    except (CheckpointingException, OSError) as error:
        raise ValueError(f"{path}: not a checkpoint of megatron-core: {error}") from error
    return bool((content or {}).get("singleton_local_shards", False))
