"""Parts of a bucket that are handled together: of one shape and equally far apart, as a layer's experts are."""

import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from slimrl.data.weights import TensorPart

Parts = tuple[TensorPart, ...]
"""A part of a tensor, and what it becomes; each with its place."""

_EXPERT = re.compile(r"\.experts\.\d+\.")


def equally_apart(changes: Sequence[Parts]) -> list[list[Parts]]:
    """Divide them into batches; from each of a batch to the next, all offsets grow by the same number of bytes.

    Only experts of a layer are in a batch together: other matrices hardly ever have a neighbour of their shape.
    """
    similar: dict[tuple[str, tuple[int, ...]], list[Parts]] = defaultdict(list)
    for parts in changes:
        first = parts[0]
        similar[_EXPERT.sub(".experts.*.", first.spec.name), (first.start, *first.shape)].append(parts)
    return [batch for alike in similar.values() for batch in _runs(alike)]


def stacked(parts: Sequence[TensorPart], memory: Tensor) -> Tensor:
    """[B, *shape], a view of the memory, of parts that are equally far apart; `memory` is uint8."""
    first: Tensor = parts[0].view(memory)
    step = parts[1].offset - parts[0].offset if len(parts) > 1 else parts[0].nbytes
    return first.as_strided((len(parts), *first.shape), (step // first.element_size(), *first.stride()))


def _runs(alike: Sequence[Parts]) -> list[list[Parts]]:
    runs, last_steps = [[alike[0]]], None
    for before, parts in pairwise(alike):
        steps = [after.offset - each.offset for each, after in zip(before, parts, strict=True)]
        if len(runs[-1]) == 1 or steps == last_steps:
            runs[-1].append(parts)
        else:
            runs.append([parts])
        last_steps = steps
    return runs
