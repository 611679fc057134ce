"""Values as JSON, between the two processes of code_harness.py.

This needs the standard library only, since it runs in the sandbox.
"""

import inspect
from collections import Counter, OrderedDict, deque, namedtuple
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from operator import itemgetter
from typing import Any

PLAIN: tuple[type, ...] = (float, str)
LARGEST_DECIMAL = 2**63
WAYS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
PAIRS: dict[str, Any] = {"Counter": Counter, "OrderedDict": OrderedDict, "dict": dict}
PARTS: dict[str, tuple[type, Callable[[Any], list[Any]]]] = {
    "complex": (complex, lambda value: [value.real, value.imag]),
    "range": (range, lambda value: [value.start, value.stop, value.step]),
    "Fraction": (Fraction, lambda value: [value.numerator, value.denominator]),
    "Decimal": (Decimal, lambda value: [str(value)]),
    "timedelta": (timedelta, lambda value: [value.days, value.seconds, value.microseconds]),
}
"""Types with the arguments that make an equal value"""
TIMES: dict[str, Any] = {"datetime": datetime, "date": date, "time": time}
SHARED: dict[str, type] = {}
"""Classes of the tests, such as the nodes of a tree, that both processes have: their objects are copied, not kept."""
ARRAY: dict[str, Callable[[list[Any]], Any]] = {"made": itemgetter(1)}
"""Makes an array of its type and the list of its items: that list, where `make_arrays` was not called"""


def make_arrays() -> None:
    """Make arrays of arrays in this process, which need not be a process that imports nothing but its own."""
    ARRAY["made"] = lambda given: __import__("numpy").array(given[1], dtype=given[0])


def encode(value: Any, keep: Callable[[Any], int]) -> Any:
    """A value as JSON; what is no plain data goes through `keep`, which gives the number of a kept object."""
    if isinstance(value, Enum) and is_shared(value):
        return {"member": [type(value).__name__, value.name]}
    if type(value).__module__ == "numpy":
        if type(value).__name__ == "ndarray":
            return {"array": [value.dtype.str, encode(value.tolist(), keep)]}
        value = value.tolist()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        # Python writes and reads no decimal number of more than 4300 digits.
        return int(value) if abs(int(value)) < LARGEST_DECIMAL else {"int": hex(value)}
    for kind in PLAIN:
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": value.hex()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {"record": [type(value).__name__, list(value._fields), [encode(item, keep) for item in value]]}
    for name, kind in WAYS.items():
        if isinstance(value, kind):
            return {name: [encode(item, keep) for item in value]}
    for name, kind in PAIRS.items():
        if isinstance(value, kind):
            return {name: [[encode(key, keep), encode(item, keep)] for key, item in value.items()]}
    for name, (kind, parts) in PARTS.items():
        if isinstance(value, kind):
            return {name: [encode(part, keep) for part in parts(value)]}
    for name, kind in TIMES.items():
        if isinstance(value, kind):
            return {name: value.isoformat()}
    return {"nodes": encode_nodes(value, keep)} if is_shared(value) else {"object": keep(value)}


def is_shared(value: Any) -> bool:
    return type(value).__name__ in SHARED


def encode_nodes(root: Any, keep: Callable[[Any], int]) -> list[Any]:
    """An object of a shared class and those that it leads to: of each the class and the attributes. One that is an
    attribute of another is its place in this list, so that lists may be long and go in circles."""
    nodes, places = [root], {id(root): 0}

    def encoded(value: Any) -> Any:
        if not is_shared(value) or isinstance(value, (tuple, Enum)):
            return encode(value, keep)
        if id(value) not in places:
            places[id(value)] = len(nodes)
            nodes.append(value)
        return {"node": places[id(value)]}

    return [[type(node).__name__, {name: encoded(one) for name, one in attributes(node)}] for node in nodes]


def attributes(node: Any) -> list[tuple[str, Any]]:
    """Attributes of an object with their values, from its dict and its slots."""
    slots = [name for kind in type(node).__mro__ for name, one in vars(kind).items() if inspect.ismemberdescriptor(one)]
    return [
        *getattr(node, "__dict__", {}).items(),
        *((name, getattr(node, name)) for name in slots if hasattr(node, name)),
    ]


def decode_nodes(given: list[Any], find: Callable[[int], Any]) -> Any:
    """The inverse of `encode_nodes`. What the class defines as a method or the like stays the class's: an object with
    methods of its own could say of itself that it is right."""
    nodes: list[Any] = [object.__new__(SHARED[name]) for name, _ in given]
    for node, (_, found) in zip(nodes, given):  # noqa: B905 - as long as each other by construction
        for name, one in found.items():
            if not is_behaviour(type(node), name):
                is_node = isinstance(one, dict) and "node" in one
                object.__setattr__(node, name, nodes[one["node"]] if is_node else decode(one, find))
    return nodes[0]


def record(name: str, fields: list[str], items: list[Any]) -> Any:
    """A named tuple, of a shared class if it is one."""
    kind: Any = SHARED.get(name)
    if not hasattr(kind, "_make"):
        return namedtuple(name, fields)._make(items)  # type: ignore[misc, attr-defined]
    return kind._make(items)


def is_behaviour(owner: type, name: str) -> bool:
    """Whether a class defines a name as a method, a property or the like."""
    found = inspect.getattr_static(owner, name, None)
    return callable(found) or (hasattr(type(found), "__get__") and not inspect.ismemberdescriptor(found))


def decode(value: Any, find: Callable[[int], Any], within: Callable[[int], Any] | None = None) -> Any:
    """The inverse of `encode`; `find` gives the object of a number, and `within` that of one within a shared object."""
    if not isinstance(value, dict):
        return value
    ((name, inner),) = value.items()
    if name == "object":
        return find(inner)
    if name == "nodes":
        return decode_nodes(inner, within or find)
    if name == "member":
        return SHARED[inner[0]][inner[1]]  # type: ignore[index]
    if name == "int":
        return int(inner, 16)
    if name == "bytes":
        return bytes.fromhex(inner)
    if name in PAIRS:
        return PAIRS[name]({decode(key, find, within): decode(item, find, within) for key, item in inner})
    if name in TIMES:
        return TIMES[name].fromisoformat(inner)
    if name == "record":
        # Its items have names, as attributes have.
        return record(inner[0], inner[1], [decode(item, within or find) for item in inner[2]])
    items = [decode(item, find, within) for item in inner]
    if name == "array":
        return ARRAY["made"](items)
    return PARTS[name][0](*items) if name in PARTS else WAYS[name](items)


def share(names: dict[str, Any], module: str) -> None:
    SHARED.clear()
    SHARED.update({name: one for name, one in names.items() if isinstance(one, type) and one.__module__ == module})
