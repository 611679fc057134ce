"""Compares two checkpoints tensor by tensor: names, shapes, dtypes and values, with a limit for differences.

1. Names, shapes and dtypes are compared without reading data.
2. Each common tensor is read from both, one tensor at a time, and compared bit for bit.
3. If bits differ, elements are compared in bands: the largest absolute and relative difference, and whether every
   element is within the tensor's limit.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slimrl.checkpoints.checkpoint_reader import CheckpointReader, read_whole
from slimrl.checkpoints.safetensors_file import spec_bytes
from slimrl.data.model_weights import TensorSpec

BAND_ELEMENTS = 1 << 22
"""Elements compared at a time; bounds the memory besides the two tensors."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class Limit:
    """An element is within it if |a - b| <= relative * max(|a|, |b|) + of_largest * largest + absolute.

    `largest` is the largest magnitude in either tensor.
    """

    reason: str
    relative: float = 0.0
    of_largest: float = 0.0
    absolute: float = 0.0


EXACT = Limit(reason="equal bits")


def rounding_limit(dtype: str) -> Limit:
    """The most that rounding to nearest changes: half a unit in the last place of `dtype`."""
    facts = torch.finfo(getattr(torch, dtype))
    half_subnormal = facts.smallest_normal * facts.eps / 2
    return Limit(reason=f"rounding to {dtype}", relative=facts.eps / 2, absolute=half_subnormal)


def fp8_limit(dtype: str) -> Limit:
    """The most that block FP8 changes in a weight that is dequantised to `dtype`.

    An e4m3 number has 3 bits after the leading one, hence a relative error of 2^-4; below 2^-6 numbers are 2^-9 apart.
    The scale of a tile is its largest magnitude / 448, which the tensor's largest magnitude bounds.
    """
    return Limit(
        reason="block FP8",
        relative=2.0**-4 + torch.finfo(getattr(torch, dtype)).eps / 2 + 1e-6,
        of_largest=2.0**-10 / 448,
        # For tiles with the smallest scale, 1e-10 / 448.
        absolute=2.0**-10 * 1e-10 / 448,
    )


def limit_of(a: TensorSpec, b: TensorSpec, *, quantised: bool) -> Limit:
    """The limit for two stored copies of a tensor.

    Args:
        quantised: exactly one of the two is in block FP8.
    """
    dtypes = [getattr(torch, spec.dtype) for spec in (a, b)]
    if not all(dtype.is_floating_point for dtype in dtypes) or (a.dtype == b.dtype and not quantised):
        return EXACT
    coarser = max(a.dtype, b.dtype, key=lambda dtype: torch.finfo(getattr(torch, dtype)).eps)
    return fp8_limit(coarser) if quantised else rounding_limit(coarser)


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """A tensor with the same name and shape but other values."""

    name: str
    max_abs: float
    max_relative: float
    """Largest |a - b| / max(|a|, |b|); infinite if only one of the two is NaN or infinite."""
    where: tuple[int, ...]
    """Index of the largest absolute difference."""
    limit: Limit
    within: bool
    """Every element is within the limit."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All differences of B from A."""

    num_tensors: int = 0
    """Tensors with the same name and shape, whose values were compared."""
    missing: list[str] = field(default_factory=list)
    """Names in A alone."""
    extra: list[str] = field(default_factory=list)
    """Names in B alone."""
    shapes: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    dtypes: list[tuple[str, str, str]] = field(default_factory=list)
    differences: list[TensorDifference] = field(default_factory=list)
    """Those beyond their limit first, the largest first."""

    @property
    def num_exceeding(self) -> int:
        return sum(not difference.within for difference in self.differences)

    @property
    def same(self) -> bool:
        """Whether B has the tensors of A, each in its dtype and within its limit."""
        return not (self.missing or self.extra or self.shapes or self.dtypes or self.num_exceeding)


def compare_checkpoints(
    a: CheckpointReader,
    b: CheckpointReader,
    choose_limit: Callable[[TensorSpec, TensorSpec], Limit],
    *,
    copies: Mapping[str, str] | None = None,
    in_order_of_b: bool = False,
    advance: Callable[[int], None] = lambda _: None,
) -> Comparison:
    """Compare every tensor. Holds one tensor of each checkpoint and a few bands at a time.

    Args:
        copies: name of a copy -> name of the tensor that it repeats; either checkpoint may lack copies.
        in_order_of_b: read in the order of B's names rather than A's, for a format that reads neighbours together.
        advance: called with the bytes of each tensor of A.
    """
    pairs = list(_pairs(a.specs, b.specs, copies or {}))
    if in_order_of_b:
        places = {name: place for place, name in enumerate(b.specs)}
        pairs.sort(key=lambda pair: places[pair[1]])
    paired_a, paired_b = {name for name, _ in pairs}, {name for _, name in pairs}
    result = Comparison(
        missing=[name for name in a.specs if name not in paired_a],
        extra=[name for name in b.specs if name not in paired_b],
        num_tensors=sum(a.specs[name].shape == b.specs[other].shape for name, other in pairs),
    )
    for name, other in pairs:
        spec, other_spec = a.specs[name], b.specs[other]
        if spec.dtype != other_spec.dtype:
            result.dtypes.append((name, spec.dtype, other_spec.dtype))
        if spec.shape != other_spec.shape:
            result.shapes.append((name, spec.shape, other_spec.shape))
            continue
        # No variable holds the two tensors, so that they are freed before the next are read.
        difference = compare_tensors(name, read_whole(a, name), read_whole(b, other), choose_limit(spec, other_spec))
        if difference is not None:
            result.differences.append(difference)
        advance(spec_bytes(spec))
    result.differences.sort(key=lambda difference: (difference.within, -difference.max_abs))
    return result


def compare_tensors(name: str, a: Tensor, b: Tensor, limit: Limit) -> TensorDifference | None:
    """How two tensors of the same shape differ; None if they have the same dtype and bits.

    Equal numbers with different bits (0 and -0, or equal values in two dtypes) differ by 0. NaN equals NaN only.
    """
    flat_a, flat_b = a.contiguous().reshape(-1), b.contiguous().reshape(-1)
    if a.dtype == b.dtype and torch.equal(*(flat.view(_BITS[flat.element_size()]) for flat in (flat_a, flat_b))):
        return None
    largest = max(_largest(flat_a), _largest(flat_b))
    max_abs, max_relative, position, within = 0.0, 0.0, 0, True
    for start in range(0, flat_a.numel(), BAND_ELEMENTS):
        x, y = (_as_float(flat[start : start + BAND_ELEMENTS]) for flat in (flat_a, flat_b))
        gap, size = _gap(x, y), torch.maximum(x.abs(), y.abs())
        band_max, band_position = (value.item() for value in gap.max(dim=0))
        if band_max > max_abs:
            max_abs, position = band_max, start + int(band_position)
        relative = torch.where(gap == 0, 0.0, gap / size).nan_to_num(nan=torch.inf, posinf=torch.inf)
        max_relative = max(max_relative, relative.max().item())
        allowed = limit.relative * size + (limit.of_largest * largest + limit.absolute)
        # Not just `gap <= allowed`: next to an infinite element everything would be allowed.
        within = within and bool(((gap == 0) | (gap.isfinite() & (gap <= allowed))).all())
    return TensorDifference(
        name=name,
        max_abs=max_abs,
        max_relative=max_relative,
        where=tuple(int(index) for index in torch.unravel_index(torch.tensor(position), a.shape)),
        limit=limit,
        within=within,
    )


def _pairs(
    a: Mapping[str, TensorSpec], b: Mapping[str, TensorSpec], copies: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """(name in A, name in B); a copy that one of the two lacks is compared with its original."""
    for name in a:
        if name in b:
            yield name, name
        elif copies.get(name) in b:
            yield name, copies[name]
    for name in b:
        if name not in a and copies.get(name) in a:
            yield copies[name], name


def _gap(x: Tensor, y: Tensor) -> Tensor:
    """|x - y|; 0 if both are NaN or the same infinity, infinite if only one is."""
    gap = torch.where((x == y) | (x.isnan() & y.isnan()), 0.0, (x - y).abs())
    return gap.nan_to_num(nan=torch.inf, posinf=torch.inf)


def _largest(flat: Tensor) -> float:
    """Largest finite magnitude."""
    sizes = (
        _as_float(flat[start : start + BAND_ELEMENTS]).abs().nan_to_num(nan=0.0, posinf=0.0)
        for start in range(0, flat.numel(), BAND_ELEMENTS)
    )
    return max((size.max().item() for size in sizes), default=0.0)


def _as_float(values: Tensor) -> Tensor:
    return values.double() if values.dtype in (torch.float64, torch.int64, torch.int32) else values.float()
