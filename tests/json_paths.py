"""Places within a value of JSON."""

from typing import Any


def paths(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to all values in a value, its own first: the keys and numbers that lead there."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [here, *(path for key, one in items for path in paths(one, (*here, key)))]
