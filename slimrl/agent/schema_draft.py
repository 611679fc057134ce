"""The draft of JSON Schema in which the parameters of a tool are written, and its patterns that cannot be checked.

Patterns of JSON Schema are those of JavaScript (ECMA-262). Python's `re` cannot read some, such as `(?<year>)`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jsonschema
from jsonschema.validators import validator_for

_DRAFTS: tuple[Any, ...] = (
    jsonschema.Draft202012Validator,
    jsonschema.Draft201909Validator,
    jsonschema.Draft7Validator,
    jsonschema.Draft6Validator,
    jsonschema.Draft4Validator,
)
"""Validators of the drafts, the newest first. Later ones changed what lists of `items`, and a true `exclusiveMinimum`,
mean."""


_OF_NAMES = ("properties", "patternProperties", "dependentSchemas", "dependencies", "$defs", "definitions")
"""Keywords whose value maps names to schemas: its keys are no keywords"""
_OF_VALUES = ("const", "enum", "default", "examples")
"""Keywords whose value holds no schemas"""


def draft_of(schema: Mapping[str, Any]) -> Any:
    """The jsonschema class for the draft that `$schema` names; for a schema that names no known one, the newest draft
    of which it is one.

    Raises:
        ValueError: it is no JSON schema.
    """
    named = isinstance(schema.get("$schema"), str) and validator_for(schema, default=None)
    problem = ""
    for draft in [named] if named else _DRAFTS:
        try:
            draft.check_schema(schema, format_checker=None)  # which would try patterns with Python's `re`
        except jsonschema.SchemaError as error:
            problem = problem or error.message
        else:
            return draft
    raise ValueError(problem)


def unread_patterns(schema: Any) -> Iterator[str]:
    """The patterns of a schema that Python cannot read."""
    for keyword, value in schema.items() if isinstance(schema, dict) else ():
        patterns = [value] if keyword == "pattern" else []
        if keyword == "patternProperties" and isinstance(value, dict):
            patterns = [*value]
        yield from (one for one in patterns if not _is_read(one))
        for inner in _inner(keyword, value):
            yield from unread_patterns(inner)


def without_unread_patterns(schema: Any) -> Any:
    """The schema without them; what stands where one would be tried is right."""
    if isinstance(schema, list):
        return [without_unread_patterns(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept = dict(schema)
    if not _is_read(kept.get("pattern")):
        del kept["pattern"]
    by_pattern = kept.get("patternProperties")
    if isinstance(by_pattern, dict) and not all(map(_is_read, by_pattern)):
        kept["patternProperties"] = {name: value for name, value in by_pattern.items() if _is_read(name)}
        # Nobody knows which names are left for these.
        kept.pop("additionalProperties", None)
        kept.pop("unevaluatedProperties", None)
    for keyword, value in kept.items():
        if keyword in _OF_NAMES and isinstance(value, dict):
            kept[keyword] = {name: without_unread_patterns(one) for name, one in value.items()}
        elif keyword not in _OF_VALUES:
            kept[keyword] = without_unread_patterns(value)
    return kept


def _inner(keyword: str, value: Any) -> Iterable[Any]:
    """What may be a schema in a keyword's value."""
    if keyword in _OF_VALUES:
        return ()
    if isinstance(value, list):
        return value
    return value.values() if keyword in _OF_NAMES and isinstance(value, dict) else [value]


def _is_read(pattern: Any) -> bool:
    if not isinstance(pattern, str):
        return True
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        return False
    return True
