"""Cutting a model's tensors into buckets: a pure function of names, shapes and dtypes.

1. Tensors are taken in their order until the next one would overfill the bucket.
2. A tensor that is larger than a bucket is cut into blocks of rows.
3. Within a bucket tensors of larger elements come first, so each is aligned to its element size and there are no gaps.

A transform changes tensors between gathering and sending, block by block; then a bucket has two descriptions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
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

        Where all regions of a tensor have some, nodes transform theirs before they send them on.
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
        ValueError: the buckets are too small, see `too_small`.
    """
    if reason := too_small(specs, bucket_bytes, transform):
        raise ValueError(f"resync.bucket_bytes: {reason}")
    buckets: list[list[TensorPart]] = []
    gathered = sent = bucket_bytes
    for spec in specs:
        for part in _fitting(spec, bucket_bytes, transform):
            more_gathered, more_sent = _sizes(part, transform)
            if max(gathered + more_gathered, sent + more_sent) > bucket_bytes:
                buckets.append([])
                gathered = sent = 0
            buckets[-1].append(part)
            gathered, sent = gathered + more_gathered, sent + more_sent
    return tuple(_bucket(parts, transform) for parts in buckets)


def too_small(specs: Sequence[TensorSpec], bucket_bytes: int, transform: Transform | None) -> str:
    """Why tensors do not fit into buckets of this size: the largest and the bytes that are enough. Empty if they fit.

    A bucket must hold the fewest rows at which a tensor can be cut.
    """
    needed, what = 0, ""
    for spec in specs:
        rows = min(num_rows(spec), transform.row_multiple if transform else 1)
        least = max(_sizes(rows_of(spec, 0, rows), transform))
        if least > max(bucket_bytes, needed):
            needed = least
            what = f"one row of {spec.name} needs" if rows == 1 else f"{rows} rows of {spec.name} need"
    return f"{bucket_bytes} bytes are too few: {what} {needed}. Use {needed} or more." if what else ""


def rows_of(spec: TensorSpec, start: int = 0, stop: int | None = None) -> TensorPart:
    """A part of some rows of a tensor, or of all, not yet placed in a bucket."""
    stop = num_rows(spec) if stop is None else stop
    nbytes = (stop - start) * prod(spec.shape[1:]) * element_bytes(spec.dtype)
    return TensorPart(spec=spec, start=start, stop=stop, offset=0, nbytes=nbytes)


def _fitting(spec: TensorSpec, bucket_bytes: int, transform: Transform | None) -> Iterator[TensorPart]:
    """The tensor as it is, or cut into blocks of rows that each fit into a bucket."""
    whole = rows_of(spec)
    if max(_sizes(whole, transform)) <= bucket_bytes:
        yield whole
        return
    step = _rows_per_bucket(spec, bucket_bytes, transform)
    for start in range(0, whole.stop, step):
        yield rows_of(spec, start, min(start + step, whole.stop))


def _rows_per_bucket(spec: TensorSpec, bucket_bytes: int, transform: Transform | None) -> int:
    multiple = transform.row_multiple if transform else 1

    def size(rows: int) -> int:
        return max(_sizes(rows_of(spec, 0, min(rows, num_rows(spec))), transform))

    blocks = bucket_bytes // size(multiple)
    # Sizes grow with the rows, though not always in proportion: the scales of quantised rows are whole tiles.
    while size((blocks + 1) * multiple) <= bucket_bytes:
        blocks += 1
    return blocks * multiple


def _sizes(part: TensorPart, transform: Transform | None) -> tuple[int, int]:
    """Sizes of a part in bytes, (gathered, sent)."""
    if transform is None:
        return part.nbytes, part.nbytes
    return part.nbytes, sum(output.nbytes for output in transform.outputs(part))


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
