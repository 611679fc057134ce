"""Speculative decoding of the engines."""

from dataclasses import dataclass
from enum import Enum
from typing import Annotated

from annotated_types import Ge

from slimrl.config.schema.types import Strict


class DraftMode(str, Enum):
    """What proposes tokens, which the policy then accepts or replaces, so that it samples as without them."""

    off = "off"
    """No speculative decoding."""
    ngram = "ngram"
    """Earlier text of the engine's requests; needs no further weights."""
    mtp = "mtp"
    """The model's own layers for multi-token prediction."""
    eagle = "eagle"
    """A draft model of EAGLE's kind, trained for this model."""
    eagle3 = "eagle3"
    """A draft model of EAGLE-3's kind, trained for this model."""


@dataclass(kw_only=True)
class SpeculativeConfig:
    mode: DraftMode = DraftMode.off
    """What proposes tokens; only on GPUs. docs/recipes.md says what it excludes."""
    draft_model: str = ""
    """Checkpoint folder of the draft model (eagle, eagle3)."""
    num_draft_tokens: Annotated[int, Strict(), Ge(2)] = 4
    """Tokens that the policy computes at a time of each request: those that are proposed and the one before them."""
