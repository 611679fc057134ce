"""Whether a Hugging Face checkpoint folder is what its config.json says; read from headers alone."""

from pathlib import Path
from typing import Any

from slimrl.models.checkpoint_reader import CheckpointReader
from slimrl.models.family import Family, family_of
from slimrl.models.hf_checkpoint import open_hf_checkpoint
from slimrl.models.hf_config import read_hf_config

MAX_LISTED = 20
"""Problems of a checkpoint that an error spells out; the rest are counted."""


def check_checkpoint(path: Path) -> None:
    """Raises ValueError if the folder is of no supported family, or its tensors are not those of its config."""
    config = read_hf_config(path)
    try:
        family = family_of(config)
        family.weight_map(config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    with open_hf_checkpoint(path) as folder:
        check_tensors(folder, family, config)


def check_tensors(folder: CheckpointReader, family: Family, hf_config: dict[str, Any]) -> bool:
    """Compare names, shapes and kinds of a checkpoint with what the model's config implies.

    The layers for multi-token prediction may be there or not, but all of them: some published checkpoints lack them
    though config.json has their number. Copies of the embedding and the output layer in them may be left out.

    Returns:
        Whether the checkpoint has the layers for multi-token prediction.

    Raises:
        ValueError: listing every difference, MAX_LISTED of them spelled out.
    """
    weight_map = family.weight_map(hf_config, mtp=True)
    found = folder.specs
    has_mtp = any(tensor.name in found for entry in weight_map.entries if entry.rule.mtp for tensor in entry.hf)
    required = [tensor for entry in weight_map.entries if has_mtp or not entry.rule.mtp for tensor in entry.hf]
    expected = {name: tensor for tensor in required for name in tensor.names}
    missing = [f"{tensor.name}: missing" for tensor in required if tensor.name not in found]
    unknown = [f"{name}: not part of this model" for name in found if name not in expected]
    other: list[str] = []
    for name, tensor in expected.items():
        if name not in found:
            continue
        if found[name].shape != tensor.shape:
            other.append(f"{name}: shape {list(found[name].shape)}, config.json implies {list(tensor.shape)}")
        if found[name].dtype not in ("float32", "bfloat16", "float16"):
            other.append(f"{name}: {found[name].dtype} is not supported, convert it to bfloat16 or float32 first")
    problems = [*missing, *unknown, *other]
    if problems:
        more = [f"and {len(problems) - MAX_LISTED} more"] if len(problems) > MAX_LISTED else []
        raise ValueError(
            f"{folder.path}: the checkpoint does not match its config.json, which is of a {family.name}: "
            f"{len(missing)} tensors missing, {len(unknown)} unknown, {len(other)} of another shape or type\n  "
            + "\n  ".join(problems[:MAX_LISTED] + more)
        )
    return has_mtp
