"""What the fingerprints of an engine's loaded tensors must be, from the trainer's live weights.

1. A tensor that reaches the engines unchanged is hashed where it lies: each piece by one of the ranks that hold it,
   with its position in the whole, and the hashes are added. Gathering, buffers and transport take no part, so a fault
   of theirs shows.
2. A tensor that is transformed on its way is hashed on the first sender as it leaves the transform. What goes into the
   transform is hashed there too, and must be the sum of the pieces' hashes.

Hashes of all ranks are added once, at the end of the version.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from slimrl.config.schema import ResyncConfig, VerifyMode
from slimrl.data.protocols import Region, SourceTensor, TensorPart, TensorSpec, WeightSource, num_rows
from slimrl.models.fingerprint import add_hashes, as_hex, partial_hash
from slimrl.models.safetensors_file import spec_bytes
from slimrl.resync.buckets import Transform
from slimrl.resync.ranks import Ranks


class Expectation:
    """Of one version. All ranks make it alike; the first sender alone calls `record`.

    Args:
        tensors: all of the trainer's.
    """

    def __init__(
        self, tensors: Sequence[SourceTensor], transform: Transform | None, config: ResyncConfig, version: int
    ) -> None:
        self._transform = transform
        sent = {tensor.spec.name: self._sent_names(tensor.spec) for tensor in tensors}
        every_name = [name for names in sent.values() for name in names]
        due = verified_names(every_name, sum(spec_bytes(tensor.spec) for tensor in tensors), config, version)
        self._tensors = [tensor for tensor in tensors if not due.isdisjoint(sent[tensor.spec.name])]
        self._changed = {tensor.spec.name for tensor in self._tensors if transform and transform.changes(tensor.spec)}
        self.names = [name for name in every_name if name in due]
        """Of the tensors to verify, as the engines get them"""
        self._before: dict[tuple[str, int], int] = {}
        self._after: dict[tuple[str, int], int] = {}

    def record(self, part: TensorPart, value: Tensor, results: Sequence[Tensor]) -> None:
        """Note a part of a tensor before and after the transform; anew where a version starts again."""
        if part.spec.name not in self._changed:
            return
        assert self._transform is not None
        self._before[part.spec.name, part.start] = _rows_hash(part.spec, part.start, value)
        outputs = self._transform.outputs(part.spec, part.start, part.stop)
        for (spec, start, _), result in zip(outputs, results, strict=True):
            self._after[spec.name, start] = _rows_hash(spec, start, result)

    def fingerprints(self, source: WeightSource, ranks: Ranks) -> tuple[dict[str, str], list[str]]:
        """What engines must have, and the tensors that came out of the gathering as something else than was held.

        All ranks call it, at the end of the version, and get the same.

        Raises:
            RankError: another rank died or is late.
        """
        rows = {name: row for row, name in enumerate([*self.names, *map(_gathered, self._changed_in_order())])}
        hashes = [0] * len(rows)

        def add(name: str, value: int) -> None:
            if name in rows:
                hashes[rows[name]] = add_hashes(hashes[rows[name]], value)

        for tensor in self._tensors:
            name = tensor.spec.name
            add(_gathered(name) if name in self._changed else name, _pieces_hash(source, tensor, ranks.rank))
        for (name, _), value in self._before.items():
            add(_gathered(name), -value)
        for (name, _), value in self._after.items():
            add(name, value)
        table = torch.tensor([value - 2**64 if value >= 2**63 else value for value in hashes], dtype=torch.int64)
        ranks.add(table)
        sums = [value % 2**64 for value in table.tolist()]
        expected = {name: as_hex(sums[rows[name]]) for name in self.names}
        return expected, [name for name in self._changed_in_order() if sums[rows[_gathered(name)]]]

    def _sent_names(self, spec: TensorSpec) -> list[str]:
        if self._transform is None:
            return [spec.name]
        return [output.name for output, _, _ in self._transform.outputs(spec, 0, num_rows(spec))]

    def _changed_in_order(self) -> list[str]:
        return [tensor.spec.name for tensor in self._tensors if tensor.spec.name in self._changed]


def verified_names(names: Sequence[str], nbytes: int, config: ResyncConfig, version: int) -> frozenset[str]:
    """Tensors to compare at a version: with `sampled` every nth, beginning with another one at each version.

    n is `sampled_versions`, or less where shares of the model would be below `sampled_bytes`. So each tensor is
    compared once in any n consecutive versions, and every rank has its part of the hashing, whatever it holds.

    Args:
        nbytes: of all the tensors.
    """
    if config.verify is VerifyMode.off:
        return frozenset()
    if config.verify is VerifyMode.full:
        return frozenset(names)
    shares = max(1, min(config.sampled_versions, nbytes // config.sampled_bytes))
    return frozenset(names[version % shares :: shares])


def _gathered(name: str) -> str:
    """The row of what the pieces of a tensor sum up to, less what was gathered."""
    return f"gathered {name}"


def _pieces_hash(source: WeightSource, tensor: SourceTensor, rank: int) -> int:
    """Of the pieces for which this rank answers; those that several ranks hold take turns."""
    spec, total = tensor.spec, 0
    for number, piece in enumerate(tensor.pieces):
        if piece.holders[number % len(piece.holders)] == rank:
            value = source.piece(spec.name).to(getattr(torch, spec.dtype))
            total = add_hashes(total, partial_hash(value, *_position(spec, piece.region)))
    return total


def _rows_hash(spec: TensorSpec, start: int, value: Tensor) -> int:
    return partial_hash(value, start * torch.Size(spec.shape[1:]).numel())


def _position(spec: TensorSpec, region: Region) -> tuple[int, int | None]:
    """(offset, row stride) of a piece as `partial_hash` takes them; it is cut along its rows or its last dimension."""
    if not region:
        return 0, None
    row = torch.Size(spec.shape[1:]).numel()
    columns = region[-1]
    if len(region) > 1 and (columns.start, columns.stop) != (0, spec.shape[-1]):
        return region[0].start * row + columns.start, spec.shape[-1]
    return region[0].start * row, None
