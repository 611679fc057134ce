"""The fingerprints that the engines' loaded tensors must have, from the trainer's live weights.

1. A tensor that reaches the engines unchanged: one holder of each piece hashes it where it lies, with its position in
   the whole, and the hashes are added. So faults of gathering, buffers and transport show.
2. A tensor that is transformed: the rank that transforms it hashes the result. It also hashes the transform's input,
   which must equal the sum of the pieces' hashes.

The hashes of all ranks are added once, at the end of the version.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from slimrl.checkpoints.safetensors_file import spec_bytes
from slimrl.config.schema.resync import ResyncConfig, VerifyMode
from slimrl.data.model_weights import Place, Region, SourceLayout, SourcePiece, TensorSpec, WeightSource, piece_of
from slimrl.models.fingerprint import add_hashes, as_hex, partial_hash
from slimrl.resync.buckets import Transform, rows_of
from slimrl.resync.ranks import Ranks

_Key = tuple[str, tuple[int, ...]]
"""Name of a tensor, and where a region of it begins."""


class ExpectedFingerprints:
    """The expected fingerprints of one version. All ranks construct it; `record` is called once for each place of a
    tensor, on any rank.

    Args:
        layout: of all the trainer's tensors.
    """

    def __init__(self, layout: SourceLayout, transform: Transform | None, config: ResyncConfig, version: int) -> None:
        self._transform = transform
        sent = {spec: self._sent_names(spec) for spec in layout}
        every_name = [name for names in sent.values() for name in names]
        of_drafts = {name for spec, names in sent.items() if spec.mtp for name in names}
        due = verified_names(every_name, sum(map(spec_bytes, layout)), config, version)
        self._layout = {spec: layout[spec] for spec, names in sent.items() if not due.isdisjoint(names)}
        # A dict, for its order.
        self._changed = dict.fromkeys(spec.name for spec in self._layout if transform and transform.changes(spec))
        self.names = [name for name in every_name if name in due]
        """Names of the tensors to verify, as the engines get them"""
        self.draft_names = [name for name in self.names if name in of_drafts]
        """Names of those tensors that are in the engines' draft models"""
        self._before: dict[_Key, int] = {}
        self._after: dict[_Key, int] = {}

    @property
    def changed(self) -> list[TensorSpec]:
        """The trainer's tensors to verify that are transformed."""
        return [spec for spec in self._layout if spec.name in self._changed]

    def record(self, place: Place, value: Tensor, results: Sequence[tuple[Place, Tensor]]) -> None:
        """Hash a place before and after the transform; replaces the hashes of an earlier attempt."""
        if place[0].spec.name not in self._changed:
            return
        self._before[_key(place)] = _place_hash(place, value)
        for output, result in results:
            self._after[_key(output)] = _place_hash(output, result)

    def fingerprints(self, source: WeightSource, ranks: Ranks) -> tuple[dict[str, str], list[str]]:
        """(what the engines must have, tensors whose gathered bytes differ from those that the ranks hold).

        All ranks call it, at the end of the version, and get the same.

        Raises:
            RankError: another rank died or is late.
        """
        rows = {name: row for row, name in enumerate([*self.names, *map(_gathered, self._changed)])}
        hashes = [0] * len(rows)

        def add(name: str, value: int) -> None:
            if name in rows:
                hashes[rows[name]] = add_hashes(hashes[rows[name]], value)

        for spec, pieces in self._layout.items():
            name = _gathered(spec.name) if spec.name in self._changed else spec.name
            add(name, _pieces_hash(source, spec, pieces, ranks.rank))
        for (name, _), value in self._before.items():
            add(_gathered(name), -value)
        for (name, _), value in self._after.items():
            add(name, value)
        table = torch.tensor([value - 2**64 if value >= 2**63 else value for value in hashes], dtype=torch.int64)
        ranks.add(table)
        sums = [value % 2**64 for value in table.tolist()]
        expected = {name: as_hex(sums[rows[name]]) for name in self.names}
        return expected, [name for name in self._changed if sums[rows[_gathered(name)]]]

    def _sent_names(self, spec: TensorSpec) -> list[str]:
        if self._transform is None:
            return [spec.name]
        return [output.spec.name for output in self._transform.outputs(rows_of(spec))]


def verified_names(names: Sequence[str], nbytes: int, config: ResyncConfig, version: int) -> frozenset[str]:
    """Tensors to compare at a version: with `sampled` every nth, beginning with another one at each version.

    n is `sampled_versions`, or less where an nth of the model would be below `sampled_bytes`. So each tensor is
    compared once in any n consecutive versions, and all ranks have tensors to hash.

    Args:
        nbytes: of all the tensors.
    """
    if config.verify is VerifyMode.off:
        return frozenset()
    if config.verify is VerifyMode.full:
        return frozenset(names)
    stride = max(1, min(config.sampled_versions, nbytes // config.sampled_bytes))
    return frozenset(names[version % stride :: stride])


def _gathered(name: str) -> str:
    """The row of a tensor's pieces less its gathered bytes: 0 if they are equal."""
    return f"gathered {name}"


def _pieces_hash(source: WeightSource, spec: TensorSpec, pieces: Sequence[SourcePiece], rank: int) -> int:
    """Sum of the hashes of the pieces that this rank hashes; the holders of a tensor's pieces take turns."""
    total = 0
    for number, piece in enumerate(pieces):
        if piece.holders[number % len(piece.holders)] == rank:
            value = piece_of(source.groups(spec.name), piece).to(getattr(torch, spec.dtype))
            total = add_hashes(total, partial_hash(value, *_position(spec, piece.region)))
    return total


def _key(place: Place) -> _Key:
    part, region = place
    return part.spec.name, tuple(edge.start for edge in region)


def _place_hash(place: Place, value: Tensor) -> int:
    part, region = place
    return partial_hash(value, *_position(part.spec, region))


def _position(spec: TensorSpec, region: Region) -> tuple[int, int | None]:
    """(offset, row stride) of a piece for `partial_hash`; pieces are cut along rows or the last dimension."""
    if not region:
        return 0, None
    row = torch.Size(spec.shape[1:]).numel()
    columns = region[-1]
    if len(region) > 1 and (columns.start, columns.stop) != (0, spec.shape[-1]):
        return region[0].start * row + columns.start, spec.shape[-1]
    return region[0].start * row, None
