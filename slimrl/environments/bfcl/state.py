"""The state of objects as one text: equal for equal states, in other processes too."""

import hashlib
import random
from collections.abc import Mapping
from typing import Any

NO_STATE = {"_api_description", "_last_modified"}
"""Attributes that say nothing about the state: a constant, and times of the clock"""
CYCLE = "cycle"


def state_id(instances: Mapping[str, Any], user_turn: int) -> str:
    """Hash of what the objects hold, private attributes too, and of the number of the user turn.

    Args:
        instances: the objects by the name of their class.
    """
    return _hashed(str(user_turn), _digest(dict(instances), {}))[:16]


def _digest(value: Any, seen: dict[int, str]) -> str:
    """Hash of a value.

    Args:
        seen: hashes of the containers so far by `id`; those that are being hashed have CYCLE.
    """
    if value is None or isinstance(value, str | int | float):
        return _hashed(type(value).__name__, repr(value))
    if id(value) not in seen:
        seen[id(value)] = CYCLE
        seen[id(value)] = _hashed(type(value).__name__, *_parts(value, seen))
    return seen[id(value)]


def _parts(value: Any, seen: dict[int, str]) -> list[str]:
    if isinstance(value, Mapping):
        return sorted(_digest(key, seen) + _digest(each, seen) for key, each in value.items())
    if isinstance(value, list | tuple):
        return [_digest(each, seen) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(_digest(each, seen) for each in value)
    if isinstance(value, random.Random):
        return [repr(value.getstate())]
    if not hasattr(value, "__dict__"):
        return [repr(value)]
    kept = {name: each for name, each in vars(value).items() if name not in NO_STATE}
    if "parent" in kept:
        # A folder's parents have the folder in them, so only their names count.
        kept["parent"] = _names_above(value)
    return _parts(kept, seen)


def _names_above(folder: Any) -> str:
    names = []
    while (folder := folder.parent) is not None:
        names.append(folder.name)
    return "/".join(names)


def _hashed(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()
