"""Which bytes travel in which bucket: a pure function of the tensors' names, shapes and dtypes.

Tensors are taken in their order until the next one would overfill the bucket. Neighbours that share an atomic name are
taken together. Within a bucket tensors of larger elements come first, so that every tensor is aligned to its element
size without gaps and the buffer is the plain concatenation that SGLang expects.
"""

from collections.abc import Sequence
from itertools import groupby

from slimrl.data.protocols import BucketSpec, TensorPart, TensorSpec, num_rows
from slimrl.models.safetensors_folder import element_bytes, spec_bytes


def plan_buckets(specs: Sequence[TensorSpec], bucket_bytes: int) -> list[BucketSpec]:
    """Buckets of at most `bucket_bytes`; a tensor or atomic group that is larger gets a bucket of its own.

    Raises:
        ValueError: tensors of one atomic name are not neighbours.
    """
    buckets: list[list[TensorSpec]] = []
    filled = bucket_bytes
    for unit in _units(specs):
        size = sum(map(spec_bytes, unit))
        if not buckets or filled + size > bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].extend(unit)
        filled += size
    return [_bucket(bucket) for bucket in buckets]


def _units(specs: Sequence[TensorSpec]) -> list[list[TensorSpec]]:
    keyed = groupby(enumerate(specs), lambda item: item[1].atomic or item[0])
    units = [(key, [spec for _, spec in members]) for key, members in keyed]
    names = [key for key, _ in units]
    apart = sorted({str(key) for key in names if names.count(key) > 1}) if len(set(names)) < len(names) else []
    if apart:
        raise ValueError(f"tensors of one atomic group are not neighbours: {', '.join(apart)}")
    return [unit for _, unit in units]


def _bucket(tensors: list[TensorSpec]) -> BucketSpec:
    parts, end = [], 0
    for spec in sorted(tensors, key=lambda spec: -element_bytes(spec.dtype)):
        nbytes = spec_bytes(spec)
        parts.append(TensorPart(spec=spec, start=0, stop=num_rows(spec), offset=end, nbytes=nbytes))
        end += nbytes
    return BucketSpec(parts=tuple(parts), nbytes=end)
