"""Server-sent events, as streaming clients read them."""

import json
from collections.abc import Mapping
from typing import Any


def data_event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def named_event(value: Mapping[str, Any]) -> bytes:
    """An event that bears the name of its `type`."""
    return f"event: {value['type']}\n".encode() + data_event(value)
