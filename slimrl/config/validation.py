"""Values of a recipe become a Recipe: pydantic checks their types and ranges, and says which keys are wrong."""

from collections.abc import Collection, Iterator, Mapping
from functools import cache, reduce
from operator import getitem
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from pydantic_core import ErrorDetails

from slimrl.config.keys import nest, type_of
from slimrl.config.problems import Violation
from slimrl.config.schema.recipe import Recipe

BOUNDS = {
    "greater_than": "greater than {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "below {lt:g}",
    "less_than_equal": "at most {le:g}",
    "finite_number": "a finite number",
}
"""pydantic's types of errors about the range of a number -> what the number must be"""


@cache
def _adapter() -> TypeAdapter[Recipe]:
    config = ConfigDict(extra="forbid", coerce_numbers_to_str=True, allow_inf_nan=False)
    return TypeAdapter(with_config(config)(Recipe))


def validated(values: Mapping[str, Any]) -> tuple[Recipe, list[str], list[Violation]]:
    """The recipe of these values by dotted key, the keys whose value is of another type, and what is out of range.

    Values of another type are left out of the recipe. Those out of range are in it, for rules about other settings.
    """
    try:
        return _recipe_of(values), [], []
    except ValidationError as error:
        found = [(key, one) for one in error.errors(include_url=False) if (key := _key_of(one, values))]
    wrong = [key for key, one in found if _reason(one) is None]
    violations = [(key, reason) for key, one in found if key not in wrong and (reason := _reason(one))]
    recipe = _recipe_of(values, without={key for key, _ in found})
    for key in dict.fromkeys(key for key, _ in violations):
        for to in _both(key, values):
            _put(recipe, to, converted(key, values[key]))
    return recipe, list(dict.fromkeys(wrong)), violations


def converted(key: str, value: Any) -> Any:
    """The value as the setting's type, whatever its range; itself if it is no such value.

    A reference's needs this since variables of the environment are text.
    """
    try:
        return TypeAdapter(type_of(key), config=ConfigDict(coerce_numbers_to_str=True)).validate_python(value)
    except ValidationError:
        return value


def _both(key: str, values: Mapping[str, Any]) -> Iterator[str]:
    """The key, and the critic's to which the value goes too."""
    yield key
    if key.startswith("trainer.") and f"critic.{key}" not in values:
        yield f"critic.{key}"


def _recipe_of(values: Mapping[str, Any], without: Collection[str] = ()) -> Recipe:
    nested = nest(((to, value) for key, value in values.items() for to in _both(key, values)), {})
    for *parents, name in (to.split(".") for key in without for to in _both(key, values)):
        del reduce(getitem, parents, nested)[name]
    return _adapter().validate_python(nested)


def _key_of(error: ErrorDetails, values: Mapping[str, Any]) -> str | None:
    """The key of the values that an error is about, or a part of its value; None for what the critic has from it."""
    parts = list(map(str, error["loc"]))
    ends = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((key for key in ends if key in values), None)


def _reason(error: ErrorDetails) -> str | None:
    """What is wrong with a value of the right type; None for another type."""
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    if error["type"] not in BOUNDS:
        return None
    return f"{error['input']}: must be {BOUNDS[error['type']].format(**error.get('ctx', {}))}."


def _put(recipe: Recipe, key: str, value: Any) -> None:
    *parents, name = key.split(".")
    section: dict[str, Any] = vars(recipe)
    for parent in parents:
        section = section[parent] if isinstance(section[parent], dict) else vars(section[parent])
    section[name] = value
