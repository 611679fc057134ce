"""What a config.json says against the model that the trainer would build from it under a recipe.

1. The family reads config.json through a dictionary that notes which keys were asked for.
2. Each of these keys is changed in turn, and the facts of the model that change with it are what it decides. A key
   whose other values the family refuses is fixed.
3. megatron-core's configuration is built twice, with the recipe's `trainer.megatron` and without, and compared with
   the family's facts field by field.
"""

import dataclasses
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from slimrl_tools.config_fields import kind_of_field, matters, variants

from slimrl.config.schema import TrainerConfig
from slimrl.models.family import Family, family_of
from slimrl.models.megatron_config import MegatronModelConfig
from slimrl.trainer.build import transformer_config


@dataclass(frozen=True, kw_only=True)
class Row:
    """One fact of the model, or one setting of the recipe."""

    field: str
    """Its name in megatron-core."""
    keys: dict[str, Any]
    """Keys of config.json that decide it, with their values."""
    family: Any
    """What the family makes of them; None where it leaves the field alone."""
    built: Any
    """What the trainer builds."""
    note: str
    agrees: bool


@dataclass(frozen=True, kw_only=True)
class ConfigDiff:
    family: str
    rows: list[Row]
    fixed: dict[str, Any]
    """Keys of config.json of which the family takes no other value."""
    unread: dict[str, Any]
    """Keys that may mean another model and that nothing reads."""
    irrelevant: list[str] = field(default_factory=list)
    """Keys that nothing reads and that need not be."""

    @property
    def agrees(self) -> bool:
        return not self.unread and all(row.agrees for row in self.rows)


class _Recorder(dict[str, Any]):
    """Notes the keys that were asked for."""

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
        ValueError: the family is not supported, or the recipe asks for what cannot be built.
    """
    family = family_of(hf_config)
    model = family.megatron_config(hf_config)
    read = keys_read(family, hf_config)
    decided, fixed = _effects(family, hf_config, read)
    unread = {key: value for key, value in hf_config.items() if key not in read}
    facts = facts_of(model)
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
    """All that a family says of a model, under megatron-core's names where it has one."""
    others = {name: value for name, value in dataclasses.asdict(model).items() if name != "transformer"}
    return {**others, **model.transformer}


def keys_read(family: Family, hf_config: dict[str, Any]) -> set[str]:
    """Keys of config.json, present or not, that the family asks for."""
    recorder = _Recorder(hf_config)
    family.megatron_config(recorder)
    family.hf_tensor_specs(recorder)
    return recorder.asked | {"model_type"}


def _effects(
    family: Family, hf_config: dict[str, Any], read: set[str]
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """(fact -> the keys that decide it, with their values; keys whose other values are all refused)."""
    facts = facts_of(family.megatron_config(hf_config))
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
                # The made-up value may be of a kind that the key never has.
                refused += isinstance(error, ValueError)
                continue
            for name in facts:
                if changed.get(name) != facts[name]:
                    decided.setdefault(name, {})[key] = value
        if tried and refused == tried:
            fixed[key] = value
    return decided, fixed


def _fact_row(name: str, value: Any, keys: dict[str, Any], trainer: TrainerConfig, built: dict[str, Any]) -> Row:
    """A fact of the family; the trainer hands those without a field in `built` to the model as they are."""
    family, result = _plain(value), built.get(name, _plain(value))
    note, agrees = "", True
    if result != family:
        origin = f"trainer.megatron.{name}" if name in trainer.megatron else "the trainer"
        note, agrees = f"{origin} changes {_WHAT[kind_of_field(name)]}", kind_of_field(name) != "model"
    return Row(field=name, keys=keys, family=family, built=result, note=note, agrees=agrees)


def _setting_row(name: str, built: dict[str, Any], without: dict[str, Any]) -> Row:
    """A setting of the recipe on which config.json has no say."""
    kind = kind_of_field(name)
    if name not in built:
        note, agrees = "not of the model: optimizer or gradients", True
    elif built[name] == without[name]:
        note, agrees = "what it would be without the recipe", True
    else:
        note, agrees = f"changes {_WHAT[kind]}, otherwise {without[name]}", kind != "model"
    return Row(field=name, keys={}, family=None, built=built.get(name), note=f"trainer.megatron: {note}", agrees=agrees)


_WHAT = {"model": "the model", "training": "the training, not the model", "execution": "speed, memory or rounding"}


def _values(config: TransformerConfig) -> dict[str, Any]:
    return {known.name: _plain(getattr(config, known.name)) for known in dataclasses.fields(config)}


def _plain(value: Any) -> Any:
    """As a recipe would write it."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return getattr(value, "__name__", "a function") if callable(value) else value
