"""Whether a Hugging Face checkpoint folder is what its config.json says; read from headers alone."""

from pathlib import Path

from slimrl.models.family import family_of
from slimrl.models.hf_config import read_hf_config
from slimrl.models.safetensors_folder import SafetensorsFolder
from slimrl.models.weight_map import WeightMap

MAX_LISTED = 20
"""Problems of a checkpoint that an error spells out; the rest are counted."""


def check_checkpoint(path: Path) -> None:
    """Raises ValueError if the folder is of no supported family, or its tensors are not those of its config."""
    config = read_hf_config(path)
    try:
        weight_map = family_of(config).weight_map(config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    with SafetensorsFolder(path) as folder:
        check_tensors(folder, weight_map)


def check_tensors(folder: SafetensorsFolder, weight_map: WeightMap) -> None:
    """Compare names, shapes and kinds of a checkpoint with what the model's config implies.

    Raises:
        ValueError: listing every difference, MAX_LISTED of them spelled out.
    """
    expected, found = weight_map.hf_tensors, folder.specs
    problems = [f"{name}: missing" for name in expected if name not in found]
    problems += [f"{name}: not part of this model" for name in found if name not in expected]
    for name, tensor in expected.items():
        if name not in found:
            continue
        if found[name].shape != tensor.shape:
            problems.append(f"{name}: shape {list(found[name].shape)}, config.json implies {list(tensor.shape)}")
        if found[name].dtype not in ("float32", "bfloat16", "float16"):
            problems.append(f"{name}: {found[name].dtype} is not supported, convert it to bfloat16 or float32 first")
    if problems:
        more = [f"and {len(problems) - MAX_LISTED} more"] if len(problems) > MAX_LISTED else []
        raise ValueError(
            f"{folder.path}: the checkpoint does not match its config.json:\n  "
            + "\n  ".join(problems[:MAX_LISTED] + more)
        )
