"""Blocks of a tensor as plain numbers: (start, stop) for each dimension; () is all of a scalar.

Other than the slices of a Region they can be compared in order, and sent between processes.
"""

from collections.abc import Iterator, Sequence
from math import prod

Box = tuple[tuple[int, int], ...]


def box_of(region: Sequence[slice]) -> Box:
    return tuple((edge.start, edge.stop) for edge in region)


def slices_of(box: Box, origin: Box) -> tuple[slice, ...]:
    """The box, counted from the first element of another one that contains it."""
    return tuple(slice(a - first, b - first) for (a, b), (first, _) in zip(box, origin, strict=True))


def elements(box: Box) -> int:
    return prod(stop - start for start, stop in box)


def intersection(one: Box, other: Box) -> Box | None:
    """None where they have nothing in common."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def contains(outer: Box, box: Box) -> bool:
    return all(a <= c and d <= b for (a, b), (c, d) in zip(outer, box, strict=True))


def rows(box: Box) -> int:
    """Size along dimension 0; 1 for a scalar."""
    return box[0][1] - box[0][0] if box else 1


def cut(box: Box, num_rows: int) -> tuple[Box, Box]:
    """The first `num_rows` rows of a box and the others; some of each."""
    (start, stop), *rest = box
    assert 0 < num_rows < stop - start, "both parts must have rows"
    return ((start, start + num_rows), *rest), ((start + num_rows, stop), *rest)


def pieces(box: Box, most_rows: int) -> Iterator[Box]:
    """The box in parts of at most `most_rows` rows."""
    while rows(box) > most_rows:
        first, box = cut(box, most_rows)
        yield first
    yield box
