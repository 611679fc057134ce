"""Fields that the passthrough sections may set: those of the installed megatron-core and SGLang whose verdict is safe.

Any other is refused with the reason; so is one on which there is no verdict.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from slimrl.config.aliases import alias_of
from slimrl.config.megatron_verdicts import MEGATRON_VERDICTS
from slimrl.config.package_fields import PackageFields, megatron_fields, sglang_fields
from slimrl.config.problems import Violation, near_name, suggestion
from slimrl.config.sglang_verdicts import SGLANG_VERDICTS, TEACHER_VERDICTS
from slimrl.config.verdicts import Judgement, Verdict

MEGATRON = ("trainer.megatron", "critic.trainer.megatron")

VERDICTS: dict[str, Mapping[str, Judgement]] = {
    "trainer.megatron": MEGATRON_VERDICTS,
    "critic.trainer.megatron": {
        name: replace(judgement, reason=judgement.reason.replace("trainer.", "critic.trainer."))
        for name, judgement in MEGATRON_VERDICTS.items()
    },
    "rollout.sglang": SGLANG_VERDICTS,
    "teacher.sglang": TEACHER_VERDICTS,
}
"""Section -> field -> the verdict on it."""

AT_LEAST_1 = (
    *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "recompute_num_layers"),
    "context_length",
)
FRACTIONS = ("optimizer_offload_fraction",)
"""Numbers whose range the packages' types do not say"""


def passthrough_fields(section: str) -> PackageFields:
    """Fields that a passthrough section may set.

    Raises:
        ValueError: the package is not installed, or its version is not supported.
    """
    return (megatron_fields if section in MEGATRON else sglang_fields)()


def safe_fields(section: str, fields: Iterable[str]) -> list[str]:
    """The names of those of the fields that a recipe may set."""
    verdicts = VERDICTS[section]
    return [name for name in fields if name in verdicts and verdicts[name].verdict is Verdict.safe]


def field_problem(section: str, name: str, value: Any, fields: PackageFields) -> str | None:
    """What is wrong with `section.name: value`, or None."""
    if name not in fields:
        meant = alias_of(f"{section}.{name}") or near_name(name, safe_fields(section, fields))
        return "no such field in the installed version." + (f" Did you mean {meant}?" if meant else "")
    judgement = VERDICTS[section].get(name)
    if judgement is None:
        return "slimrl has not judged what this field of the installed version does. Leave it out."
    if judgement.verdict is not Verdict.safe:
        return judgement.reason
    field = fields[name]
    if field.accepts(value):
        wrong = field.unknown(value)
        return _not_one_of(wrong[0], field.words) if wrong else _unsupported(value, judgement) or _range(name, value)
    if field.choices and not field.types - {type(None)}:
        return _not_one_of(value, field.choices)
    return f"expected {field.text}, got {value!r}."


def _unsupported(value: Any, judgement: Judgement) -> str | None:
    """What is wrong with a value of the right type that the field's judgement leaves out."""
    for item in value if isinstance(value, list) else [value]:
        if judgement.values and item is not None and item not in judgement.values:
            return f"{item}: {judgement.instead}. Use {' or '.join(map(str, judgement.values))}."
    return None


def _range(name: str, value: Any) -> str | None:
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value}: must be a finite number."
    if name in AT_LEAST_1 and value is not None and value < 1:
        return f"{value}: must be at least 1."
    return f"{value}: must lie between 0 and 1." if name in FRACTIONS and not 0 <= value <= 1 else None


def unused_fields(section: str, given: Mapping[str, Any]) -> Iterator[Violation]:
    """Fields that have no effect without another one of the section. One that is false was turned off, with those that
    belong to it."""
    for name in given:
        judgement = VERDICTS[section].get(name)
        if judgement is not None and judgement.needs and given.get(judgement.needs) in (None, "none"):
            yield f"{section}.{name}", f"has no effect without {section}.{judgement.needs}."


def _not_one_of(value: Any, choices: Iterable[Any]) -> str:
    known = [str(choice) for choice in choices]
    return f"{value!r} is not one of {', '.join(known)}." + suggestion(str(value), known)
