"""What an episode begins with: a line of a prompt file."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True)
class Prompt:
    """One line of a prompt file."""

    prompt_id: str
    """`<file stem>:<line number>`, or the line's own `id`."""
    messages: list[dict[str, Any]]
    label: Any
    metadata: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    """Place of the prompt, `file:line`, for errors."""
