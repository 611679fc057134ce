"""Values as they stand in the page: JSON that ends no script element, and compressed parts that are read on demand."""

import base64
import gzip
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

LEVELS = 65_534
"""Number of steps between the smallest and the largest value of a packed quantity"""
UNKNOWN = 65_535
"""Packed value of what is not known"""


def script_json(value: Any) -> str:
    """JSON in ASCII that means the same inside of an HTML script element, whatever texts it holds.

    Raises:
        ValueError: a number is NaN or infinite.
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def compressed(value: Any) -> str:
    """Base64 of the value's gzipped JSON; equal values give equal texts. Numbers that JSON has not, which a policy may
    write in a call, become texts."""
    data = json.dumps(_finite(value), separators=(",", ":"), allow_nan=False).encode()
    return base64.b64encode(gzip.compress(data, compresslevel=5, mtime=0)).decode()


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value


def quantity(values: Sequence[float | None] | np.ndarray) -> dict[str, Any] | None:
    """A number of each token, at 65,535 levels between the smallest and the largest.

    Args:
        values: float [T]; NaN or None where unknown.

    Returns:
        `low`, `high` and `data`, Base64 of uint16 [T] in little-endian order; None if all are unknown.
    """
    array_T = np.array([np.nan if value is None else value for value in values], np.float64)
    array_T[~np.isfinite(array_T)] = np.nan
    known_T = ~np.isnan(array_T)
    if not known_T.any():
        return None
    low, high = float(array_T[known_T].min()), float(array_T[known_T].max())
    levels_T = np.full(len(array_T), UNKNOWN, "<u2")
    scale = (high - low) or 1.0
    levels_T[known_T] = np.round((array_T[known_T] - low) / scale * LEVELS)
    return {"low": low, "high": high, "data": base64.b64encode(levels_T.tobytes()).decode()}
