"""Compares a config.json with the model that the trainer would build from it under a recipe.

1. The family reads config.json through a dictionary that records the keys that it reads.
2. Each of these keys is changed in turn; the fields of the model that change with it are those that it decides. If the
   family refuses every other value, the key is fixed.
3. megatron-core's configuration is built with the recipe's `trainer.megatron` and without, and compared with the
   family's field by field.
"""

import dataclasses
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from slimrl_tools.inspect.config_fields import matters, variants

from slimrl.config.megatron_verdicts import MEGATRON_VERDICTS
from slimrl.config.schema.trainer import TrainerConfig
from slimrl.config.verdicts import Verdict
from slimrl.models.family import Family, family_of
from slimrl.models.megatron_config import MegatronModelConfig
from slimrl.trainer.build import transformer_config


@dataclass(frozen=True, kw_only=True)
class Row:
    """A field of the model, or a setting of the recipe."""

    field: str
    """Its name in megatron-core."""
    keys: dict[str, Any]
    """Keys of config.json that decide it, with their values."""
    family: Any
    """The family's value; None if it does not set the field."""
    built: Any
    """The trainer's value."""
    note: str
    agrees: bool


@dataclass(frozen=True, kw_only=True)
class ConfigDiff:
    family: str
    rows: list[Row]
    fixed: dict[str, Any]
    """Keys of config.json for which the family accepts no other value."""
    unread: dict[str, Any]
    """Keys that nothing reads and that may mean another model."""
    irrelevant: list[str] = field(default_factory=list)
    """Harmless keys that nothing reads."""

    @property
    def agrees(self) -> bool:
        return not self.unread and all(row.agrees for row in self.rows)


class _Recorder(dict[str, Any]):
    """Records the keys that were read."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)


def diff_config(hf_config: dict[str, Any], trainer: TrainerConfig) -> ConfigDiff:
    """Compare, field by field.

    Raises:
        ValueError: the family is not supported, or the recipe cannot be built.
    """
    family = family_of(hf_config)
    model = family.megatron_config(hf_config)
    read = keys_read(family, hf_config)
    unread = {key: value for key, value in hf_config.items() if key not in read}
    facts = facts_of(model)
    decided, fixed = _effects(family, hf_config, read, facts)
    with_recipe, without = (
        _values(transformer_config(dataclasses.replace(trainer, megatron=settings), model))
        for settings in (trainer.megatron, {})
    )
    rows = [_fact_row(name, value, decided.get(name, {}), trainer, with_recipe) for name, value in facts.items()]
    rows += [_setting_row(name, with_recipe, without) for name in trainer.megatron if name not in facts]
    return ConfigDiff(
        family=family.name,
        rows=rows,
        fixed=fixed,
        unread={key: value for key, value in unread.items() if matters(key, hf_config)},
        irrelevant=[key for key in unread if not matters(key, hf_config)],
    )


def facts_of(model: MegatronModelConfig) -> dict[str, Any]:
    """A family's values, under megatron-core's names where it has one."""
    others = {name: value for name, value in dataclasses.asdict(model).items() if name != "transformer"}
    return {**others, **model.transformer}


def keys_read(family: Family, hf_config: dict[str, Any]) -> set[str]:
    """Keys that the family reads, present in config.json or not."""
    recorder = _Recorder(hf_config)
    family.megatron_config(recorder)
    family.hf_tensor_specs(recorder)
    return recorder.asked | {"model_type"}


def _effects(
    family: Family, hf_config: dict[str, Any], read: set[str], facts: dict[str, Any]
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """(field -> the keys that decide it, with their values; keys whose other values are all refused)."""
    decided: dict[str, dict[str, Any]] = {}
    fixed: dict[str, Any] = {}
    for key, value in hf_config.items():
        if key not in read or key == "model_type":
            continue
        refused, tried = 0, 0
        for other in variants(value):
            tried += 1
            try:
                changed = facts_of(family.megatron_config({**hf_config, key: other}))
            except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
                # The made-up value may be of a type that the key never has.
                refused += isinstance(error, ValueError)
                continue
            for name in facts:
                if changed.get(name) != facts[name]:
                    decided.setdefault(name, {})[key] = value
        if tried and refused == tried:
            fixed[key] = value
    return decided, fixed


def _fact_row(name: str, value: Any, keys: dict[str, Any], trainer: TrainerConfig, built: dict[str, Any]) -> Row:
    """A field that the family sets; those that TransformerConfig lacks reach the model unchanged."""
    family, result = _plain(value), built.get(name, _plain(value))
    note, agrees = "", True
    if result != family:
        origin = f"trainer.megatron.{name}" if name in trainer.megatron else "the trainer"
        note, agrees = f"{origin} changes {_what(name)}", not _is_models(name)
    return Row(field=name, keys=keys, family=family, built=result, note=note, agrees=agrees)


def _setting_row(name: str, built: dict[str, Any], without: dict[str, Any]) -> Row:
    """A setting of the recipe that config.json does not decide."""
    if name not in built:
        note, agrees = f"not a model setting: {_what(name)}", True
    elif built[name] == without[name]:
        note, agrees = "the default", True
    else:
        note, agrees = f"changes {_what(name)}; default {without[name]}", not _is_models(name)
    return Row(field=name, keys={}, family=None, built=built.get(name), note=f"trainer.megatron: {note}", agrees=agrees)


def _is_models(name: str) -> bool:
    """Whether a field, or a fact of a family that megatron-core has no field for, decides what the weights compute."""
    return name not in MEGATRON_VERDICTS or MEGATRON_VERDICTS[name].verdict is Verdict.model


def _what(name: str) -> str:
    return "the model" if _is_models(name) else MEGATRON_VERDICTS[name].reason


def _values(config: TransformerConfig) -> dict[str, Any]:
    return {known.name: _plain(getattr(config, known.name)) for known in dataclasses.fields(config)}


def _plain(value: Any) -> Any:
    """As a recipe writes it."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return getattr(value, "__name__", "a function") if callable(value) else value
