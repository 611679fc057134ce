"""The draft of JSON Schema in which the parameters of a tool are written."""

from collections.abc import Mapping
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
"""Later ones changed what lists of `items`, and a true `exclusiveMinimum`, mean."""


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
            draft.check_schema(schema)
        except jsonschema.SchemaError as error:
            problem = problem or error.message
        else:
            return draft
    raise ValueError(problem)
