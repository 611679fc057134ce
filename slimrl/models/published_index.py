"""Names, shapes and dtypes of the tensors that published models store, known before a model is downloaded.

A file of `hf_indices/` is named after a model and has parts, each with what it rests on:

| evidence | the names, shapes and dtypes are |
|---|---|
| published | of the headers of this model's own files |
| sibling | of the headers of another published model of the same sizes |
| documented | said by those who convert or load the model |
| derived | of transformers' model, built from the published config.json, or of a model in this table |

A name holds ranges: `model.layers.{0..47}.mlp.experts.{0..127}.up_proj.weight`. A dtype that no source gives is `?`.
"""

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

Evidence = Literal["published", "sibling", "documented", "derived"]

_RANGES = re.compile(r"\{([\d.,]+)\}")
_BEFORE_EXPERT = ".experts."


@dataclass(frozen=True, kw_only=True)
class PublishedTensor:
    shape: tuple[int, ...]
    dtype: str | None
    """Dtype as safetensors spells it; None if no source gives it."""
    evidence: Evidence


def index_names() -> list[str]:
    """Models whose tensors are known."""
    return sorted(file.name.removesuffix(".json") for file in _folder().iterdir() if file.name.endswith(".json"))


def published_tensors(name: str, *, expert_ranges: bool = False) -> dict[str, PublishedTensor]:
    """A published model's tensors by name.

    Args:
        name: one of `index_names`.
        expert_ranges: the experts of a layer have one name, with their range.
    """
    tensors: dict[str, PublishedTensor] = {}
    for part in json.loads((_folder() / f"{name}.json").read_text())["parts"]:
        for pattern, stored in part["tensors"].items():
            dtype, shape = stored.split(" ", 1)
            tensor = PublishedTensor(
                shape=tuple(json.loads(shape)), dtype=None if dtype == "?" else dtype, evidence=part["evidence"]
            )
            for each in _expand(pattern, expert_ranges):
                assert each not in tensors, f"{name}: {each} twice"
                tensors[each] = tensor
    return tensors


def is_stored_in(name: str, dtype: str) -> bool:
    """Whether a published model's files hold tensors of this dtype, as safetensors spells it."""
    return name in index_names() and any(
        tensor.dtype == dtype for tensor in published_tensors(name, expert_ranges=True).values()
    )


def _expand(pattern: str, expert_ranges: bool) -> Iterator[str]:
    """`a.{0..1,4}.b`: a.0.b, a.1.b, a.4.b."""
    before, experts, after = pattern.partition(_BEFORE_EXPERT) if expert_ranges else (pattern, "", "")
    texts = _RANGES.split(before)
    numbers = (
        [text] if place % 2 == 0 else [str(number) for run in text.split(",") for number in _run(run)]
        for place, text in enumerate(texts)
    )
    return ("".join(parts) + experts + after for parts in itertools.product(*numbers))


def _run(text: str) -> range:
    first, _, last = text.partition("..")
    return range(int(first), int(last or first) + 1)


def _folder() -> Any:
    return resources.files("slimrl.models") / "hf_indices"
