"""What a training checkpoint says of its model, compared with the model that loads it. Torch-free."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

from slimrl.base.strict_json import json_object
from slimrl.config.lora_rules import adapter_targets
from slimrl.config.schema.trainer import LoraConfig
from slimrl.models.family import family_of
from slimrl.models.hf_config import read_hf_config
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
    different = _differences(saved, current)
    if different:
        found = "; ".join(different.values())
        if all(name.startswith("lora_") for name in different):
            instead = "Give the trainer.lora of the run that saved it, or take that run's export."
            raise ValueError(f"{directory}: a checkpoint with other adapters: {found}. {instead}")
        raise ValueError(f"{directory}: a checkpoint of another model: {found}")


def refuse_another_model(option: str, path: Path, model: Path) -> None:
    """
    Args:
        option: of a command, for the message.
        path: Hugging Face checkpoint folder of the option.
        model: that of the model whose engines are to load it.

    Raises:
        ValueError: the two have different architectures, or `path` has one that is not supported.
    """
    try:
        different = _differences(architecture_of(read_hf_config(path)), architecture_of(read_hf_config(model)))
    except ValueError as error:
        raise ValueError(f"{option} {path}: {error}") from error
    if different:
        found = "; ".join(different.values())
        raise ValueError(f"{option} {path}: another model than {model}, whose engines cannot load it: {found}.")


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, str]:
    """What is said of each fact that differs, by the fact's name."""
    missing = object()
    return {
        name: f"{name} is {there.get(name, 'absent')} there and {here.get(name, 'absent')} here"
        for name in sorted({*there, *here})
        if there.get(name, missing) != here.get(name, missing)
    }
