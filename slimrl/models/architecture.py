"""What a training checkpoint says of its model, compared with the model that loads it. Torch-free."""

import json
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

from slimrl.base.strict_json import json_object
from slimrl.config.lora_rules import adapter_targets
from slimrl.config.schema.trainer import LoraConfig
from slimrl.models.family import family_of
from slimrl.models.megatron_config import MegatronModelConfig

FACTS_FILE = "checkpoint.json"
"""File of a training checkpoint with its `architecture` and the `layout` that saved it."""

ADDED_FACTS = {one.name: one.default for one in fields(MegatronModelConfig) if one.default is not MISSING}
"""Facts of an architecture that a checkpoint may lack because it was saved before there were such, and what it was."""

HF_SUBFOLDER = "hf"
"""Subfolder of a training checkpoint with config.json and tokenizer of its model."""


def weights_folder(path: Path) -> Path:
    """Folder with the weights of a training checkpoint: the folder itself, or `trainer` in a run's checkpoint."""
    return path / "trainer" if (path / "trainer").is_dir() else path


def architecture_of(hf_config: dict[str, Any]) -> dict[str, Any]:
    """Family and Megatron configuration of a model, as JSON values.

    Raises:
        ValueError: the family or an option of the config is not supported.
    """
    family = family_of(hf_config)
    model = asdict(family.megatron_config(hf_config))
    return json.loads(json.dumps({"family": family.name, **model.pop("transformer"), **model}))


def trained_architecture(hf_config: dict[str, Any], lora: LoraConfig, *, critic: bool = False) -> dict[str, Any]:
    """What a training checkpoint says of the model: its architecture, its adapters if it has any, and a critic's
    head."""
    targets = adapter_targets(lora, hf_config)
    adapters = {"lora_rank": lora.rank, "lora_alpha": lora.alpha, "lora_targets": list(targets)} if lora.rank else {}
    head = {"tie_embeddings": False, "value_head": True} if critic else {}
    return architecture_of(hf_config) | adapters | head


def read_facts(directory: Path) -> dict[str, Any]:
    """Raises ValueError if the folder is no training checkpoint."""
    path = directory / FACTS_FILE
    if not path.is_file():
        raise ValueError(f"{directory}: not a checkpoint, it has no {FACTS_FILE}")
    return json_object(path)


def check_architecture(directory: Path, current: dict[str, Any]) -> None:
    """Raises ValueError naming every difference between `current` and the architecture of the checkpoint."""
    saved = {name: value for name, value in ADDED_FACTS.items() if name in current}
    facts = read_facts(directory).get("architecture")
    if not isinstance(facts, dict):
        raise ValueError(f"{directory / FACTS_FILE}: holds no `architecture`")
    saved |= facts
    missing = object()
    different = [name for name in sorted({*saved, *current}) if saved.get(name, missing) != current.get(name, missing)]
    if different:
        found = "; ".join(
            f"{name} is {saved.get(name, 'absent')} there and {current.get(name, 'absent')} here" for name in different
        )
        if all(name.startswith("lora_") for name in different):
            instead = "Give the trainer.lora of the run that saved it, or take that run's export."
            raise ValueError(f"{directory}: a checkpoint with other adapters: {found}. {instead}")
        raise ValueError(f"{directory}: a checkpoint of another model: {found}")
