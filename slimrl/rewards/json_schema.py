"""Reward for an answer that is JSON of a given schema: 1.0 or 0.0.

Keys that occur twice, NaN, Infinity and numbers beyond a float are no JSON here (strict_json.py).
"""

from collections.abc import Iterator
from typing import Any

from jsonschema import ValidationError
from jsonschema.exceptions import SchemaError
from jsonschema.protocols import Validator
from jsonschema.validators import extend, validator_for
from referencing import Registry

from slimrl.base.strict_json import strict_json
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Trajectory
from slimrl.rewards.patterns import compiled, occurs
from slimrl.rewards.texts import AnswerPlace


class JsonSchema:
    """Whether the answer is one JSON value of the schema.

    Args:
        schema: for all prompts, in the draft that its `$schema` names, else the newest; without remote references.
        schema_key: instead, the key of each prompt's metadata that holds its schema.
    """

    def __init__(self, *, schema: dict[str, Any] | None = None, schema_key: str = "", answer_in: str = "text") -> None:
        if (schema is None) == (not schema_key):
            raise ValueError("give schema or schema_key, one of the two")
        self._validator = None if schema is None else _validator(schema, "schema")
        self._key, self._place = schema_key, AnswerPlace(answer_in)

    def __call__(self, trajectory: Trajectory, prompt: Prompt) -> float:
        """Raises ValueError or KeyError if the prompt has no valid schema."""
        validator = self._validator or _validator(prompt.metadata[self._key], f"metadata.{self._key}")
        answer = self._place.of(trajectory)
        if answer is None:
            return 0.0
        try:
            return float(validator.is_valid(strict_json(answer)))
        except (ValueError, RecursionError, TimeoutError):
            return 0.0


def _validator(schema: Any, name: str) -> Validator:
    """Raises ValueError for a broken schema."""
    kind = validator_for(schema)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"{name}: {error.message} (at {error.json_path})") from error
    # jsonschema matches with `re`, which a text of the policy could hold up.
    if _has_pattern_properties(schema):
        raise ValueError(f"{name}: no patternProperties; use propertyNames with a pattern, and additionalProperties")
    return extend(kind, {"pattern": _pattern})(schema, registry=Registry())


def _pattern(validator: Validator, pattern: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(instance, str) and not occurs(compiled(pattern, "pattern"), instance):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


def _has_pattern_properties(schema: Any) -> bool:
    inner = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    return (isinstance(schema, dict) and "patternProperties" in schema) or any(map(_has_pattern_properties, inner))
