"""The objects that the tools of an entry act on, and the calls that the policy makes of their methods.

A method is called with a copy of the arguments, which it may keep and change; no text of the policy is evaluated.
Answers and errors are those of the package's own executor.
"""

import copy
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from slimrl.environments.bfcl.entry import Entry
from slimrl.environments.bfcl.package import CLASSES, STATELESS_CLASSES
from slimrl.environments.bfcl.python_calls import call_text

FAILED = "Error during execution: "
"""Begins the answer to a call that raised, as in the package"""
LARGEST = {"exponent": 1e3, "precision": 1e3, "decimal_places": 1e3, "base": 1e15}
"""Largest size of the numbers of MathAPI that would otherwise take any amount of time and memory, by parameter"""


class Instances:
    """One fresh object of each class of an entry, and the functions that the policy may call of them.

    Args:
        offered: names of these functions. Others, and methods that begin with an underscore, cannot be called.
    """

    def __init__(self, entry: Entry, offered: Collection[str]) -> None:
        self.by_class = {name: _instance(name, entry) for name in entry.involved_classes}
        self._methods: dict[str, Any] = {}
        self.offer(offered)

    def offer(self, names: Collection[str]) -> None:
        """Let the policy call these functions too."""
        for one in self.by_class.values():
            public = (name for name in names if not name.startswith("_"))
            self._methods |= {name: getattr(one, name) for name in public if hasattr(one, name)}

    def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, str | None]:
        """The answer to a call, and the call as Python text for the checker; None if nothing was called."""
        if name not in self._methods:
            return f"{FAILED}name '{name}' is not defined", None
        text = call_text(name, arguments)
        if text is None:
            return f"{FAILED}arguments of {name} must be named by identifiers and have finite numbers", None
        if large := _too_large(arguments):
            return f"{FAILED}{large} of {name} is too large", None
        try:
            with kept_defaults([self._methods[name].__func__]):
                result = self._methods[name](**copy.deepcopy(dict(arguments)))
        except Exception as error:  # noqa: BLE001 - the package answers whatever its methods raise
            return f"{FAILED}{error}", text
        return _shown(result), text


@contextmanager
def kept_defaults(functions: Sequence[Any]) -> Iterator[None]:
    """Give functions their default arguments again afterwards: some are lists, which the package's methods change."""
    before = [copy.deepcopy(function.__defaults__) for function in functions]
    try:
        yield
    finally:
        for function, defaults in zip(functions, before, strict=True):
            function.__defaults__ = defaults


def is_error(answer: str) -> bool:
    """Whether a call raised, or its function answered that it could not do it."""
    return answer.startswith((FAILED, '{"error":'))


def _instance(class_name: str, entry: Entry) -> Any:
    made = CLASSES[class_name]()
    if class_name not in STATELESS_CLASSES:
        config = copy.deepcopy(entry.initial_config.get(class_name, {}))
        made._load_scenario(config, long_context=entry.is_long)
    return made


def _shown(result: Any) -> str:
    if isinstance(result, str):
        return result
    if isinstance(result, dict):
        try:
            return json.dumps(result)
        except (TypeError, ValueError, RecursionError):
            return str(result)
    return str(result)


def _too_large(arguments: Mapping[str, Any]) -> str | None:
    """The first argument that is beyond LARGEST."""
    for name, value in arguments.items():
        if name in LARGEST and isinstance(value, int | float) and abs(value) > LARGEST[name]:
            return name
    return None
