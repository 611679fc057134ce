"""What is used of the package bfcl-eval, imported here: once, in the process that forks one for each episode."""

import importlib
import json
from pathlib import Path
from typing import Any

import bfcl_eval
from bfcl_eval.constants.executable_backend_config import (
    CLASS_FILE_PATH_MAPPING,
    MULTI_TURN_FUNC_DOC_FILE_MAPPING,
    STATELESS_CLASSES,
)
from bfcl_eval.constants.type_mappings import GORILLA_TO_OPENAPI
from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker

__all__ = ["CHECKERS_OBJECTS", "CLASSES", "DATA", "JSON_TYPES", "STATELESS_CLASSES", "class_functions", "json_lines",
           "multi_turn_checker"]  # fmt: skip

OTHER_CLASSES = ("WebSearchAPI", "MemoryAPI_kv", "MemoryAPI_vector", "MemoryAPI_rec_sum")
"""Those that the entries of several turns do not need, and which need further packages"""
CLASSES: dict[str, Any] = {
    name: getattr(importlib.import_module(path), name)
    for name, path in CLASS_FILE_PATH_MAPPING.items()
    if name not in OTHER_CLASSES
}
"""The classes that the tools act on, by name"""
DATA = Path(bfcl_eval.__file__).parent / "data"
JSON_TYPES: dict[str, str] = GORILLA_TO_OPENAPI
"""Type of JSON Schema by the type in the package's descriptions"""
CHECKERS_OBJECTS: dict[str, Any] = vars(multi_turn_utils)
"""Where the checker keeps the objects that it makes, by name"""


def class_functions(class_name: str) -> list[dict[str, Any]]:
    """The package's descriptions of the functions of a class, in its order."""
    return json_lines(DATA / "multi_turn_func_doc" / MULTI_TURN_FUNC_DOC_FILE_MAPPING[class_name])


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
