"""A task of BFCL: what a user asks for turn by turn, the objects that the tools act on, and the ground truth."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slimrl.environments.bfcl.later import CALL_LATER
from slimrl.environments.bfcl.python_calls import parse_call


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One task."""

    id: str
    """`<category>_<number>`; the package's checker reads the category from it"""
    involved_classes: list[str]
    initial_config: dict[str, Any]
    questions: list[list[dict[str, Any]]]
    """Messages of each user turn; none where functions are added"""
    ground_truth: list[list[str]]
    """Python calls of each user turn"""
    missed_function: dict[str, list[str]] = field(default_factory=dict)
    """Names of the functions that are only added at a user turn, by the turn's number from 0"""
    functions: list[str] | None = None
    """Names of the functions that the policy is shown; None for all of the classes"""

    @property
    def is_long(self) -> bool:
        """Whether the tools' answers are padded, which is what the category long_context means."""
        return "long_context" in self.id

    def solution(self) -> list[list[dict[str, Any]]]:
        """The ground truth as the policy would call it: `{"name", "arguments"}` of each call of each user turn."""
        later = {name for names in self.missed_function.values() for name in names}
        return [[_later(call) if call["name"] in later else call for call in map(parse_call, turn)]
                for turn in self.ground_truth]  # fmt: skip

    def to_metadata(self) -> dict[str, Any]:
        """The metadata of a prompt, with the calls of `solution` for players."""
        kept = {name: value for name, value in vars(self).items() if value is not None}
        return {**kept, "solution": self.solution()}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> "Entry":
        """Raises ValueError: the metadata are not those of `to_metadata`."""
        names = cls.__dataclass_fields__
        try:
            return cls(**{name: metadata[name] for name in names if name in metadata})
        except TypeError as error:
            raise ValueError(
                f"the prompt's metadata are no task of BFCL ({error}). Use the prompt files that data.py writes."
            ) from error


def _later(call: dict[str, Any]) -> dict[str, Any]:
    return {"name": CALL_LATER, "arguments": call}
