"""Cutting a model's tensors into buckets: a pure function of names, shapes and dtypes.

1. Tensors are taken in their order until the next one would overfill the bucket.
2. Neighbours of one fused group go into one bucket. Tensors of layers for multi-token prediction, which engines hold in
   another model, go into buckets of their own.
3. A tensor that is larger than a bucket is cut into blocks of rows.
4. Within a bucket tensors of larger elements come first, so each is aligned to its element size and there are no gaps.

A transform changes tensors between gathering and sending, block by block; then a bucket has two descriptions.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from math import prod
from typing import Protocol

from torch import Tensor

from slimrl.checkpoints.safetensors_file import element_bytes
from slimrl.data.model_weights import Place, Region, TensorPart, TensorSpec, num_rows, packed_bytes


class Transform(Protocol):
    """A change of tensors between gathering and sending, for example quantisation."""

    @property
    def row_multiple(self) -> int:
        """Tensors are cut at multiples of this many rows."""
        ...

    def changes(self, spec: TensorSpec) -> bool:
        """Whether the engines get other bytes of a tensor than the trainer has."""
        ...

    def outputs(self, part: TensorPart) -> list[TensorPart]:
        """The parts that these rows become; their offsets are not set."""
        ...

    def output_regions(self, spec: TensorSpec, region: Region) -> tuple[Region, ...] | None:
        """The region of each output that follows from this region of a tensor, if it is smaller; None otherwise.

        Where all regions of a tensor have some, nodes transform theirs before they send them to each other.
        """
        ...

    def apply(self, bucket: "Bucket", gathered: Tensor, sent: Tensor, places: Sequence[Place] | None = None) -> None:
        """Write into `sent` what the bucket in `gathered` becomes; both are uint8 and begin with the bucket.

        Args:
            places: what to transform, whole parts or regions with `output_regions`; None for the bucket.

        Raises:
            ValueError: the values cannot be transformed; it names the tensor.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Parts of tensors that travel together, packed one after the other in one flat buffer."""

    gathered: tuple[TensorPart, ...]
    """Parts of the bucket as the trainer has them"""
    sent: tuple[TensorPart, ...]
    """Parts of the bucket as the engines get them; the same object where there is no transform"""

    @property
    def gathered_bytes(self) -> int:
        return packed_bytes(self.gathered)

    @property
    def sent_bytes(self) -> int:
        return packed_bytes(self.sent)

    def outputs(self, transform: Transform, part: TensorPart) -> tuple[TensorPart, ...]:
        """What a gathered part becomes, in its place."""
        return tuple(self._places[output.spec.name, output.start] for output in transform.outputs(part))

    @cached_property
    def _places(self) -> dict[tuple[str, int], TensorPart]:
        return {(part.spec.name, part.start): part for part in self.sent}


def cut_buckets(
    specs: Sequence[TensorSpec], bucket_bytes: int, transform: Transform | None = None
) -> tuple[Bucket, ...]:
    """Buckets of at most `bucket_bytes`, both gathered and sent.

    Raises:
        ValueError: tensors of one fused group are not neighbours; or the buckets are too small, see `too_small`.
    """
    if reason := too_small(specs, bucket_bytes, transform):
        raise ValueError(f"resync.bucket_bytes: {reason}")
    buckets: list[list[TensorPart]] = []
    gathered = sent = bucket_bytes
    for unit in _units(specs):
        for parts in _fitting(unit, bucket_bytes, transform):
            more_gathered, more_sent = _sizes(parts, transform)
            is_of_other_model = bool(buckets) and buckets[-1][0].spec.mtp is not parts[0].spec.mtp
            if is_of_other_model or max(gathered + more_gathered, sent + more_sent) > bucket_bytes:
                buckets.append([])
                gathered = sent = 0
            buckets[-1] += parts
            gathered, sent = gathered + more_gathered, sent + more_sent
    return tuple(_bucket(parts, transform) for parts in buckets)


def too_small(specs: Sequence[TensorSpec], bucket_bytes: int, transform: Transform | None) -> str:
    """Why tensors do not fit into buckets of this size: the largest and the bytes that are enough. Empty if they fit.

    A bucket must hold all tensors of one fused group, and of another tensor the fewest rows at which it can be cut.

    Raises:
        ValueError: tensors of one fused group are not neighbours.
    """
    needed, what = 0, ""
    for unit in _units(specs):
        if max(_sizes(list(map(rows_of, unit)), transform)) <= max(bucket_bytes, needed):
            continue
        least, of = _least(unit, transform)
        if least > max(bucket_bytes, needed):
            needed, what = least, of
    return f"{bucket_bytes} bytes are too few: {what} {needed}. Use {needed} or more." if what else ""


def rows_of(spec: TensorSpec, start: int = 0, stop: int | None = None) -> TensorPart:
    """A part of some rows of a tensor, or of all, not yet placed in a bucket."""
    stop = num_rows(spec) if stop is None else stop
    nbytes = (stop - start) * prod(spec.shape[1:]) * element_bytes(spec.dtype)
    return TensorPart(spec=spec, start=start, stop=stop, offset=0, nbytes=nbytes)


def _units(specs: Sequence[TensorSpec]) -> list[list[TensorSpec]]:
    keyed = groupby(enumerate(specs), lambda item: item[1].fused_group or item[0])
    units = [(key, [spec for _, spec in members]) for key, members in keyed]
    if apart := sorted(str(key) for key, times in Counter(key for key, _ in units).items() if times > 1):
        raise ValueError(f"tensors of one fused group are not neighbours: {', '.join(apart)}")
    return [unit for _, unit in units]


def _fitting(unit: list[TensorSpec], bucket_bytes: int, transform: Transform | None) -> Iterator[list[TensorPart]]:
    """The unit as it is, or cut into blocks of rows that each fit into a bucket."""
    whole = list(map(rows_of, unit))
    if max(_sizes(whole, transform)) <= bucket_bytes:
        yield whole
        return
    (part,) = whole
    step = _rows_per_bucket(part.spec, bucket_bytes, transform)
    for start in range(0, part.stop, step):
        yield [rows_of(part.spec, start, min(start + step, part.stop))]


def _least(unit: list[TensorSpec], transform: Transform | None) -> tuple[int, str]:
    """Bytes of the smallest bucket that holds a unit, and what needs them."""
    if len(unit) > 1:
        names = ", ".join(spec.name for spec in unit)
        return max(_sizes(list(map(rows_of, unit)), transform)), f"{names} travel together and need"
    (spec,) = unit
    rows = min(num_rows(spec), transform.row_multiple if transform else 1)
    what = f"one row of {spec.name} needs" if rows == 1 else f"{rows} rows of {spec.name} need"
    return max(_sizes([rows_of(spec, 0, rows)], transform)), what


def _rows_per_bucket(spec: TensorSpec, bucket_bytes: int, transform: Transform | None) -> int:
    multiple = transform.row_multiple if transform else 1

    def size(rows: int) -> int:
        return max(_sizes([rows_of(spec, 0, min(rows, num_rows(spec)))], transform))

    blocks = bucket_bytes // size(multiple)
    # Sizes grow with the rows, though not always in proportion: the scales of quantised rows are whole tiles.
    while size((blocks + 1) * multiple) <= bucket_bytes:
        blocks += 1
    return blocks * multiple


def _sizes(parts: Sequence[TensorPart], transform: Transform | None) -> tuple[int, int]:
    """Sizes of parts in bytes, (gathered, sent)."""
    gathered = sum(part.nbytes for part in parts)
    if transform is None:
        return gathered, gathered
    return gathered, sum(output.nbytes for part in parts for output in transform.outputs(part))


def _bucket(parts: Sequence[TensorPart], transform: Transform | None) -> Bucket:
    gathered = _packed(parts)
    if transform is None:
        return Bucket(gathered=gathered, sent=gathered)
    return Bucket(gathered=gathered, sent=_packed([out for part in parts for out in transform.outputs(part)]))


def _packed(parts: Sequence[TensorPart]) -> tuple[TensorPart, ...]:
    placed, end = [], 0
    for part in sorted(parts, key=lambda part: -element_bytes(part.spec.dtype)):
        placed.append(replace(part, offset=end))
        end += part.nbytes
    return tuple(placed)
