"""Cutting a model's tensors into buckets: a pure function of names, shapes and dtypes.

1. Tensors are taken in their order until the next one would overfill the bucket.
2. Neighbours that share an atomic name go into one bucket together.
3. A tensor that is larger than a bucket is cut into blocks of rows.
4. Within a bucket tensors of larger elements come first, so each is aligned to its element size and there are no gaps.

A transform changes tensors between gathering and sending, block by block; then a bucket has two descriptions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Protocol

from torch import Tensor

from slimrl.data.protocols import BucketSpec, TensorPart, TensorSpec, num_rows
from slimrl.models.safetensors_file import element_bytes

Rows = tuple[TensorSpec, int, int]
"""(a whole tensor, first row, end row)"""


class Transform(Protocol):
    """What is done to a tensor between the trainer and the engine, for example quantisation."""

    @property
    def row_multiple(self) -> int:
        """Tensors are cut at multiples of this many rows."""
        ...

    def changes(self, spec: TensorSpec) -> bool:
        """Whether a tensor reaches the engines with other bytes than the trainer has."""
        ...

    def outputs(self, spec: TensorSpec, start: int, stop: int) -> list[Rows]:
        """What these rows of a tensor become."""
        ...

    def apply(self, part: TensorPart, value: Tensor, outputs: Sequence[Tensor]) -> None:
        """Write what `part`, whose values are `value`, becomes into `outputs`, in the order of the method `outputs`.

        Raises:
            ValueError: the values cannot be transformed; it names the tensor.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class PlannedBucket:
    gathered: BucketSpec
    """The trainer's tensors"""
    sent: BucketSpec
    """What the engines get of them; the same object where there is no transform."""


def cut_buckets(
    specs: Sequence[TensorSpec], bucket_bytes: int, transform: Transform | None = None
) -> tuple[PlannedBucket, ...]:
    """Buckets of at most `bucket_bytes`, both gathered and sent.

    Raises:
        ValueError: tensors of one atomic name are not neighbours; or the buckets are too small, see `too_small`.
    """
    if reason := too_small(specs, bucket_bytes, transform):
        raise ValueError(f"resync.bucket_bytes: {reason}")
    buckets: list[list[Rows]] = []
    gathered = sent = bucket_bytes
    for unit in _units(specs):
        for rows in _fitting(unit, bucket_bytes, transform):
            more_gathered, more_sent = _sizes(rows, transform)
            if max(gathered + more_gathered, sent + more_sent) > bucket_bytes:
                buckets.append([])
                gathered = sent = 0
            buckets[-1] += rows
            gathered, sent = gathered + more_gathered, sent + more_sent
    return tuple(_planned(rows, transform) for rows in buckets)


def too_small(specs: Sequence[TensorSpec], bucket_bytes: int, transform: Transform | None = None) -> str:
    """Why tensors do not go into buckets of this size, with the largest that does not and the bytes that are enough.

    Empty where they do: tensors of one atomic name go into a bucket together, and of others the fewest rows at which
    they can be cut.

    Raises:
        ValueError: tensors of one atomic name are not neighbours.
    """
    needed, what = 0, ""
    for unit in _units(specs):
        whole = [(spec, 0, num_rows(spec)) for spec in unit]
        if max(_sizes(whole, transform)) <= max(bucket_bytes, needed):
            continue
        least, of = _least(unit, transform)
        if least > max(bucket_bytes, needed):
            needed, what = least, of
    return f"{bucket_bytes} bytes are too few: {what} {needed}. Use {needed} or more." if what else ""


def rows_bytes(rows: Rows) -> int:
    spec, start, stop = rows
    return (stop - start) * prod(spec.shape[1:]) * element_bytes(spec.dtype)


def _units(specs: Sequence[TensorSpec]) -> list[list[TensorSpec]]:
    keyed = groupby(enumerate(specs), lambda item: item[1].atomic or item[0])
    units = [(key, [spec for _, spec in members]) for key, members in keyed]
    seen: set[str | int] = set()
    apart: set[str | int] = set()
    for key, _ in units:
        (apart if key in seen else seen).add(key)
    if apart:
        raise ValueError(f"tensors of one atomic group are not neighbours: {', '.join(map(str, sorted(apart)))}")
    return [unit for _, unit in units]


def _fitting(unit: list[TensorSpec], bucket_bytes: int, transform: Transform | None) -> Iterator[list[Rows]]:
    """The unit as it is, or cut into blocks of rows that each fit into a bucket."""
    whole = [(spec, 0, num_rows(spec)) for spec in unit]
    if max(_sizes(whole, transform)) <= bucket_bytes:
        yield whole
        return
    ((spec, _, end),) = whole
    step = _rows_per_bucket(spec, bucket_bytes, transform)
    for start in range(0, end, step):
        yield [(spec, start, min(start + step, end))]


def _least(unit: list[TensorSpec], transform: Transform | None) -> tuple[int, str]:
    """Bytes of the smallest bucket that takes a unit, and what it is that needs them."""
    if len(unit) > 1:
        names = ", ".join(spec.name for spec in unit)
        return max(_sizes([(spec, 0, num_rows(spec)) for spec in unit], transform)), f"{names} travel together and need"
    (spec,) = unit
    rows = min(num_rows(spec), transform.row_multiple if transform else 1)
    what = f"one row of {spec.name} needs" if rows == 1 else f"{rows} rows of {spec.name} need"
    return max(_sizes([(spec, 0, rows)], transform)), what


def _rows_per_bucket(spec: TensorSpec, bucket_bytes: int, transform: Transform | None) -> int:
    multiple = transform.row_multiple if transform else 1

    def size(rows: int) -> int:
        return max(_sizes([(spec, 0, min(rows, num_rows(spec)))], transform))

    blocks = bucket_bytes // size(multiple)
    # Sizes grow with the rows, though not always in proportion: the scales of quantised rows are whole tiles.
    while size((blocks + 1) * multiple) <= bucket_bytes:
        blocks += 1
    return blocks * multiple


def _outputs(rows: Rows, transform: Transform | None) -> list[Rows]:
    return transform.outputs(*rows) if transform else [rows]


def _sizes(rows: Sequence[Rows], transform: Transform | None) -> tuple[int, int]:
    """Bytes (gathered, sent)."""
    gathered = sum(map(rows_bytes, rows))
    if transform is None:
        return gathered, gathered
    return gathered, sum(rows_bytes(output) for block in rows for output in _outputs(block, transform))


def _planned(rows: Sequence[Rows], transform: Transform | None) -> PlannedBucket:
    gathered = _packed(rows)
    if transform is None:
        return PlannedBucket(gathered=gathered, sent=gathered)
    return PlannedBucket(
        gathered=gathered, sent=_packed([output for block in rows for output in _outputs(block, transform)])
    )


def _larger_first(rows: Rows) -> int:
    return -element_bytes(rows[0].dtype)


def _packed(rows: Sequence[Rows]) -> BucketSpec:
    parts, end = [], 0
    for block in sorted(rows, key=_larger_first):
        spec, start, stop = block
        nbytes = rows_bytes(block)
        parts.append(TensorPart(spec=spec, start=start, stop=stop, offset=end, nbytes=nbytes))
        end += nbytes
    return BucketSpec(parts=tuple(parts), nbytes=end)
