"""Functions that the user adds during a conversation: how they are told, and the tool that calls them."""

import json
from typing import Any

CALL_LATER = "call_added_function"
"""The tool that calls a function which was added during the conversation: tools are shown at the start alone"""
ADDED = "I have updated some more functions you can choose from. What about now?"
"""What the user says in the package when functions are added"""

LATER_SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": CALL_LATER,
        "description": "Call a function that the user has added during the conversation.",
        "parameters": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "description": "Name of the added function."},
                "arguments": {"type": "object", "description": "Its arguments by name."},
            },
            "required": ["name", "arguments"],
        },
    },
}


def names_added(text: str) -> list[str]:
    """Names of the functions that a message of the user adds."""
    if not text.endswith(f"\n{ADDED}"):
        return []
    return [each["function"]["name"] for each in json.loads(text.removesuffix(f"\n{ADDED}"))]
