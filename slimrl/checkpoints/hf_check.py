"""Checks that a Hugging Face checkpoint has the tensors that its config.json implies; reads headers alone.

Opening a checkpoint has refused plain weights of a quantised model and a head that a tied model should not have.
"""

from pathlib import Path
from typing import Any

from slimrl.checkpoints.checkpoint_reader import CheckpointReader
from slimrl.checkpoints.hf_checkpoint import DequantizingReader, open_hf_checkpoint
from slimrl.models.family import Family, family_of
from slimrl.models.hf_config import read_hf_config
from slimrl.models.tensor_names import find_mismatches, listed
from slimrl.models.weight_map import WeightMap
from slimrl.quantization.fp8 import BlockFp8
from slimrl.quantization.fp8_tensors import quantized_names


def check_checkpoint(path: Path) -> bool:
    """Whether a checkpoint has the layers for multi-token prediction.

    Raises:
        ValueError: the folder is of no supported family, or its tensors are not those of its config.
    """
    config = read_hf_config(path)
    try:
        family = family_of(config)
        family.weight_map(config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    with open_hf_checkpoint(path) as folder:
        return check_tensors(folder, family, config)


def check_tensors(folder: CheckpointReader, family: Family, hf_config: dict[str, Any]) -> bool:
    """Compare names, shapes and dtypes of a checkpoint with what its config implies; see `find_mismatches`.

    Returns:
        Whether the checkpoint has the layers for multi-token prediction.

    Raises:
        ValueError: listing the differences, a bounded number of each kind.
    """
    specs = folder.specs
    weight_map = family.weight_map(hf_config, mtp=True)
    found = find_mismatches(weight_map, {name: spec.shape for name, spec in specs.items()})
    unknown = set(found.unknown)
    other = [
        f"{name}: shape {list(specs[name].shape)}, config.json implies {list(shape)}"
        for name, shape in found.misshaped.items()
    ]
    other += [
        f"{name}: {spec.dtype} is not supported, convert it to bfloat16 or float32 first"
        for name, spec in specs.items()
        if name not in unknown and spec.dtype not in ("float32", "bfloat16", "float16")
    ]
    if isinstance(folder, DequantizingReader):
        other += _wrongly_quantized(folder, weight_map, hf_config)
    if lines := found.lines() + listed(other, "of another shape or type"):
        raise ValueError(
            f"{folder.path}: the checkpoint does not match its config.json, which is of a {family.name}: "
            f"{len(found.missing)} tensors missing, {len(found.unknown)} unknown, {len(other)} of another shape or "
            "type\n  " + "\n  ".join(lines)
        )
    return found.has_mtp


def _wrongly_quantized(folder: DequantizingReader, weight_map: WeightMap, hf_config: dict[str, Any]) -> list[str]:
    """Matrices whose dtype on disk is not the one in which engines hold them, and to which a resync rounds them."""
    fp8 = BlockFp8.of_config(hf_config)
    assert fp8 is not None, "a checkpoint that is dequantised has a quantization_config"
    due = quantized_names(weight_map, fp8) & folder.specs.keys()
    return [f"{name}: plain, but quantization_config makes it float8" for name in sorted(due - folder.quantized)] + [
        f"{name}: float8, but quantization_config leaves it plain" for name in sorted(folder.quantized - due)
    ]
