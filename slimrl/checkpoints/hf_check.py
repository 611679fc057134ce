"""Checks that a Hugging Face checkpoint has the tensors that its config.json implies; reads headers alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimrl.checkpoints.checkpoint_reader import CheckpointReader
from slimrl.checkpoints.hf_checkpoint import open_hf_checkpoint
from slimrl.models.family import Family, family_of
from slimrl.models.hf_config import read_hf_config
from slimrl.models.weight_map import WeightMap

MAX_LISTED = 20
"""Problems that an error lists; the rest are counted."""


@dataclass(frozen=True, kw_only=True)
class TensorMismatches:
    """How a checkpoint's tensors differ from those of a weight map."""

    has_mtp: bool
    """The checkpoint has the layers for multi-token prediction."""
    missing: list[str]
    unknown: list[str]
    misshaped: dict[str, tuple[int, ...]]
    """Name -> the shape that the weight map implies."""


def find_mismatches(weight_map: WeightMap, shapes: Mapping[str, tuple[int, ...]]) -> TensorMismatches:
    """Compare tensors by name and shape with a weight map that has the layers for multi-token prediction.

    All of these layers may be missing: some published checkpoints lack them though config.json has their number. Their
    copies of the embedding and the output layer may be missing in any case.
    """
    has_mtp = any(tensor.name in shapes for entry in weight_map.entries if entry.rule.mtp for tensor in entry.hf)
    required = [tensor for entry in weight_map.entries if has_mtp or not entry.rule.mtp for tensor in entry.hf]
    known = {name: tensor.shape for tensor in required for name in tensor.names}
    return TensorMismatches(
        has_mtp=has_mtp,
        missing=[tensor.name for tensor in required if tensor.name not in shapes],
        unknown=[name for name in shapes if name not in known],
        misshaped={name: shape for name, shape in known.items() if name in shapes and shapes[name] != shape},
    )


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
        ValueError: listing the differences, at most MAX_LISTED of them.
    """
    specs = folder.specs
    found = find_mismatches(family.weight_map(hf_config, mtp=True), {name: spec.shape for name, spec in specs.items()})
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
    problems = [f"{name}: missing" for name in found.missing]
    problems += [f"{name}: not part of this model" for name in found.unknown]
    problems += other
    if problems:
        more = [f"and {len(problems) - MAX_LISTED} more"] if len(problems) > MAX_LISTED else []
        raise ValueError(
            f"{folder.path}: the checkpoint does not match its config.json, which is of a {family.name}: "
            f"{len(found.missing)} tensors missing, {len(found.unknown)} unknown, {len(other)} of another shape or "
            "type\n  " + "\n  ".join(problems[:MAX_LISTED] + more)
        )
    return found.has_mtp
