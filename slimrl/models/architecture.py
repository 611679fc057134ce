"""The facts of a model that a training checkpoint must share with the model that it is loaded into. Torch-free."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slimrl.models.family import family_of

FACTS_FILE = "checkpoint.json"
"""Of a training checkpoint: `architecture` and the `layout` that saved it."""

HF_SUBFOLDER = "hf"
"""Of a training checkpoint: config.json and tokenizer of its model."""


def weights_folder(path: Path) -> Path:
    """Where the weights of a training checkpoint lie: in the folder itself, or in `trainer` of a run's checkpoint."""
    return path / "trainer" if (path / "trainer").is_dir() else path


def architecture_of(hf_config: dict[str, Any]) -> dict[str, Any]:
    """Family and all that config.json says in the trainer's terms, positions and shared weights too, as JSON values.

    Raises:
        ValueError: the family is not supported, or the config has what it does not support.
    """
    family = family_of(hf_config)
    model = asdict(family.megatron_config(hf_config))
    return json.loads(json.dumps({"family": family.name, **model.pop("transformer"), **model}))


def read_facts(directory: Path) -> dict[str, Any]:
    """Raises ValueError where the folder is no training checkpoint."""
    path = directory / FACTS_FILE
    if not path.is_file():
        raise ValueError(f"{directory}: not a checkpoint, it has no {FACTS_FILE}")
    return json.loads(path.read_text())


def check_architecture(directory: Path, current: dict[str, Any]) -> None:
    """Raises ValueError naming every fact in which the model of the training checkpoint `directory` differs."""
    saved = read_facts(directory)["architecture"]
    missing = object()
    differences = [
        f"{name} is {saved.get(name, 'absent')} there and {current.get(name, 'absent')} here"
        for name in sorted({*saved, *current})
        if saved.get(name, missing) != current.get(name, missing)
    ]
    if differences:
        raise ValueError(f"{directory}: a checkpoint of another model: {'; '.join(differences)}")
