"""Arguments that fit a tool's JSON schema, for a call that nobody meant."""

from typing import Any

_OF_TYPE: dict[str, Any] = {
    "string": "text", "integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}, "null": None,
}  # fmt: skip


def example_arguments(parameters: dict[str, Any]) -> dict[str, Any]:
    """A value for each property of an object's schema, the optional ones included."""
    return {name: _example(schema) for name, schema in (parameters.get("properties") or {}).items()}


def _example(schema: dict[str, Any]) -> Any:
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][0]
    if "default" in schema and schema["default"] is not None:
        return schema["default"]
    for alternatives in ("anyOf", "oneOf"):
        if schema.get(alternatives):
            return _example(schema[alternatives][0])
    kind = schema.get("type", "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        return example_arguments(schema)
    if kind == "array" and schema.get("minItems") and isinstance(schema.get("items"), dict):
        return [_example(schema["items"])] * schema["minItems"]
    return _OF_TYPE[kind]
