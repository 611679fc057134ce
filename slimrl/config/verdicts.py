"""What a recipe may do with a field of a package's configuration: the words of megatron_verdicts.py and
sglang_verdicts.py."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    safe = "safe"
    """A recipe may set it: it changes speed, memory, training or rounding as the package says."""
    model = "model"
    """The field decides what the weights compute, which trainer and engines take from the model's config.json."""
    slimrl = "slimrl"
    """slimrl sets it, or cannot work with another value."""
    layout = "layout"
    """An engine with the field holds its weights where a resync does not find them."""
    sampling = "sampling"
    """Engines would sample from another distribution than that of the log-probs that they return, or of other inputs
    than those that the trainer gets."""
    security = "security"
    """The field opens a port, sets or shows a secret, or runs code of others."""
    no_effect = "no effect"
    """Nothing in a run of slimrl reads the field."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The verdict on a field."""

    verdict: Verdict
    reason: str
    """A sentence behind `section.field: `; of a safe field what it is for."""
    needs: str = ""
    """A field of the same section without which a safe one has no effect."""
    transformer_engine: bool = False
    """A safe field has an effect only with Transformer Engine's layers, so on a GPU alone."""
    values: tuple[Any, ...] = ()
    """The values that a safe field may have; empty for all that its type allows."""
    instead: str = ""
    """Why the field may not have other values than `values`."""


def judged(verdict: Verdict, reason: str, fields: str, **conditions: Any) -> dict[str, Judgement]:
    """The same judgement for several fields, which are named with spaces between them."""
    return dict.fromkeys(fields.split(), Judgement(verdict=verdict, reason=reason, **conditions))


def table(*groups: Mapping[str, Judgement]) -> dict[str, Judgement]:
    """All groups together; a field in two of them is a mistake."""
    joined: dict[str, Judgement] = {}
    for group in groups:
        twice = joined.keys() & group.keys()
        assert not twice, f"judged twice: {sorted(twice)}"
        joined |= group
    return joined
