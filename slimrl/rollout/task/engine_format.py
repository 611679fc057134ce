"""The format in which the engines of a run hold their weights."""

from pathlib import Path

from slimrl import device
from slimrl.checkpoints.hf_checkpoint import is_packed_int4
from slimrl.models.family import family_of
from slimrl.models.hf_config import read_hf_config
from slimrl.resync.buckets import Transform
from slimrl.resync.transform import quantize_transform


def engine_transform(model_path: Path) -> Transform | None:
    """The transform of the trainer's weights for engines of this checkpoint; None if they need none.

    Assumes that the engines' devices are like this process's.

    Raises:
        ValueError: `quantization_config` is not supported, is of a format that a resync cannot write, or names modules
            that the model lacks.
    """
    hf_config = read_hf_config(model_path)
    if is_packed_int4(model_path):
        raise ValueError(
            f"{model_path}: engines hold its experts in INT4, and a resync would send them others. Train a plain copy: "
            f"slimrl-tools dequantize {model_path} NEW_FOLDER"
        )
    weight_map = family_of(hf_config).weight_map(hf_config, mtp=True)
    try:
        return quantize_transform(hf_config, weight_map, fp8_engines=device.computes_block_fp8())
    except ValueError as error:
        raise ValueError(f"{model_path}: {error}") from error
