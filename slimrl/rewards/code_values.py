"""Values as JSON, between the two processes of code_harness.py.

This needs the standard library only, since it runs in the sandbox.
"""

import inspect
from collections.abc import Callable
from typing import Any

PLAIN: tuple[type, ...] = (float, str)
LARGEST_DECIMAL = 2**63
WAYS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
SHARED: dict[str, type] = {}
"""Classes of the tests, such as the nodes of a tree, that both processes have: their objects are copied, not kept."""


def encode(value: Any, keep: Callable[[Any], int]) -> Any:
    """A value as JSON; what is no plain data goes through `keep`, which gives the number of a kept object."""
    if type(value).__module__ == "numpy":
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
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    for name, kind in WAYS.items():
        if isinstance(value, kind):
            return {name: [encode(item, keep) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key, keep), encode(item, keep)] for key, item in value.items()]}
    return {"nodes": encode_nodes(value, keep)} if is_shared(value) else {"object": keep(value)}


def is_shared(value: Any) -> bool:
    return type(value).__name__ in SHARED and hasattr(value, "__dict__")


def encode_nodes(root: Any, keep: Callable[[Any], int]) -> list[Any]:
    """An object of a shared class and those that it leads to: of each the class and the attributes. One that is an
    attribute of another is its place in this list, so that lists may be long and go in circles."""
    nodes, places = [root], {id(root): 0}

    def encoded(value: Any) -> Any:
        if not is_shared(value):
            return encode(value, keep)
        if id(value) not in places:
            places[id(value)] = len(nodes)
            nodes.append(value)
        return {"node": places[id(value)]}

    return [[type(node).__name__, {name: encoded(one) for name, one in vars(node).items()}] for node in nodes]


def decode_nodes(given: list[Any], find: Callable[[int], Any]) -> Any:
    """The inverse of `encode_nodes`. What the class defines as a method or the like stays the class's: an object with
    methods of its own could say of itself that it is right."""
    nodes: list[Any] = [object.__new__(SHARED[name]) for name, _ in given]
    for node, (_, attributes) in zip(nodes, given):  # noqa: B905 - as long as each other by construction
        for name, one in attributes.items():
            if not is_behaviour(type(node), name):
                is_node = isinstance(one, dict) and "node" in one
                vars(node)[name] = nodes[one["node"]] if is_node else decode(one, find)
    return nodes[0]


def is_behaviour(owner: type, name: str) -> bool:
    """Whether a class defines a name as a method, a property or the like."""
    found = inspect.getattr_static(owner, name, None)
    return callable(found) or hasattr(type(found), "__get__")


def decode(value: Any, find: Callable[[int], Any], within: Callable[[int], Any] | None = None) -> Any:
    """The inverse of `encode`; `find` gives the object of a number, and `within` that of one within a shared object."""
    if not isinstance(value, dict):
        return value
    ((name, inner),) = value.items()
    if name == "object":
        return find(inner)
    if name == "nodes":
        return decode_nodes(inner, within or find)
    if name == "int":
        return int(inner, 16)
    if name == "bytes":
        return bytes.fromhex(inner)
    if name == "complex":
        return complex(*inner)
    if name == "dict":
        return {decode(key, find, within): decode(item, find, within) for key, item in inner}
    return WAYS[name]([decode(item, find, within) for item in inner])


def share(names: dict[str, Any], module: str) -> None:
    SHARED.clear()
    SHARED.update({name: one for name, one in names.items() if isinstance(one, type) and one.__module__ == module})
