"""The facts of a model that a training checkpoint must share with the model that it is loaded into. Torch-free."""

import json
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
    """Family, vocabulary and everything that shapes the layers, as JSON values."""
    family = family_of(hf_config)
    model = family.megatron_config(hf_config)
    facts = {"family": family.name, "vocab_size": model.vocab_size, **model.transformer}
    return json.loads(json.dumps(facts))


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
