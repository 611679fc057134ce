"""A conversation token by token, for a reader."""

from dataclasses import dataclass, field
from typing import Literal

Source = Literal["prompt", "policy", "tool", "template"]


@dataclass(frozen=True, kw_only=True)
class PreviewToken:
    id: int
    text: str
    source: Source
    """`template` is what the chat template writes between turns."""
    trained: bool


@dataclass(frozen=True, kw_only=True)
class Preview:
    stop_token_ids: tuple[int, ...]
    segments: list[list[PreviewToken]]
    not_repeated: list[str] = field(default_factory=list)
    """What the chat template leaves out of earlier turns"""
    rewrites_results: bool = False
    """Whether it writes a call or its result differently once a later call follows"""
