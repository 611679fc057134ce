"""The functions of the package's classes as tools: their JSON schemas in OpenAI's form.

`full` schemas are those that the package itself shows a model that takes tools of OpenAI's chat API; `short` ones have
the names and types alone, for models that cannot read long prompts.
"""

import copy
import json
from collections.abc import Sequence
from typing import Any, Literal

from slimrl.environments.bfcl.entry import Entry
from slimrl.environments.bfcl.later import ADDED, LATER_SCHEMA
from slimrl.environments.bfcl.package import JSON_TYPES, class_functions

Descriptions = Literal["full", "short"]

PYTHON_HINT = " Note that the provided function is in Python 3 syntax."
FLOAT_HINT = " This is a float type value."
"""What the package adds to descriptions"""


def first_functions(entry: Entry) -> list[dict[str, Any]]:
    """Descriptions of the functions that an entry has from its start on."""
    later = {name for names in entry.missed_function.values() for name in names}
    return [
        {**each, "description": each["description"] + PYTHON_HINT}
        for each in _functions(entry)
        if each["name"] not in later
    ]


def added_functions(entry: Entry, user_turn: int) -> list[dict[str, Any]]:
    """Descriptions of the functions that an entry adds at a user turn."""
    names = entry.missed_function.get(str(user_turn), [])
    return [each for name in names for each in _functions(entry) if each["name"] == name]


def schemas(functions: Sequence[dict[str, Any]], descriptions: Descriptions) -> list[dict[str, Any]]:
    """The functions as tools of OpenAI's chat API."""
    written = _short if descriptions == "short" else _full
    return [{"type": "function", "function": written(copy.deepcopy(each))} for each in functions]


def first_tools(entry: Entry, descriptions: Descriptions) -> list[dict[str, Any]]:
    """The tools that the policy is shown."""
    shown = schemas(first_functions(entry), descriptions)
    return [*shown, LATER_SCHEMA] if entry.missed_function else shown


def added_text(functions: Sequence[dict[str, Any]], descriptions: Descriptions) -> str:
    """What the user says when functions are added: their schemas as a JSON list, then ADDED."""
    return f"{json.dumps(schemas(functions, descriptions))}\n{ADDED}"


def _functions(entry: Entry) -> list[dict[str, Any]]:
    every = [each for name in entry.involved_classes for each in class_functions(name)]
    return [each for each in every if entry.functions is None or each["name"] in entry.functions]


def _full(function: dict[str, Any]) -> dict[str, Any]:
    function["name"] = function["name"].replace(".", "_")
    function["parameters"]["type"] = "object"
    _convert_properties(function["parameters"]["properties"])
    return function


def _short(function: dict[str, Any]) -> dict[str, Any]:
    full = _full(function)
    properties = {name: {"type": each["type"]} for name, each in full["parameters"]["properties"].items()}
    parameters = {"type": "object", "properties": properties, "required": full["parameters"]["required"]}
    return {"name": full["name"], "parameters": parameters}


def _convert_properties(properties: dict[str, dict[str, Any]]) -> None:
    """Turn the types of the package's descriptions into those of JSON Schema; a type that is not known is a string."""
    for each in properties.values():
        if each.get("type") == "float":
            each["format"] = "float"
            each["description"] += FLOAT_HINT
        each["type"] = JSON_TYPES.get(each.get("type", "any"), "string")
        if each["type"] not in ("array", "object"):
            continue
        if "properties" in each:
            _convert_properties(each["properties"])
        elif "items" in each:
            _convert_items(each["items"])


def _convert_items(items: dict[str, Any]) -> None:
    items["type"] = JSON_TYPES[items["type"]]
    if items["type"] == "array" and "items" in items:
        items["items"]["type"] = JSON_TYPES[items["items"]["type"]]
    elif items["type"] == "object" and "properties" in items:
        _convert_properties(items["properties"])
