"""What the fingerprints of loaded tensors must be: computed by the trainer's ranks from their live weights.

Each piece is hashed where it lies, by one of the ranks that hold it, with its position in the whole tensor, and the
hashes are added. Neither the gathering nor the buffers take part, so a fault of theirs shows.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable

import torch

from slimrl.data.protocols import Region, SourceTensor, TensorSpec, WeightSource
from slimrl.models.fingerprint import add_hashes, as_hex, partial_hash
from slimrl.resync.ranks import Ranks


def expected_fingerprints(
    source: WeightSource, tensors: Iterable[SourceTensor], names: Collection[str], ranks: Ranks
) -> dict[str, str]:
    """Fingerprints of the named tensors as `models.fingerprint` defines them; all ranks call it and get the same.

    Raises:
        RankError: another rank died or is late.
    """
    mine: dict[str, int] = {}
    for tensor in tensors:
        spec = tensor.spec
        if spec.name not in names:
            continue
        for number, piece in enumerate(tensor.pieces):
            if piece.holders[number % len(piece.holders)] == ranks.rank:
                value = source.piece(spec.name).to(getattr(torch, spec.dtype))
                mine[spec.name] = partial_hash(value, *_position(spec, piece.region))
    hashes: defaultdict[str, int] = defaultdict(int)
    for theirs in ranks.gather_objects(mine):
        for name, value in theirs.items():
            hashes[name] = add_hashes(hashes[name], value)
    return {name: as_hex(value) for name, value in hashes.items()}


def _position(spec: TensorSpec, region: Region) -> tuple[int, int | None]:
    """(offset, row stride) of a piece as `partial_hash` takes them; it is cut along its rows or its last dimension."""
    if not region:
        return 0, None
    row = torch.Size(spec.shape[1:]).numel()
    columns = region[-1]
    if len(region) > 1 and (columns.start, columns.stop) != (0, spec.shape[-1]):
        return region[0].start * row + columns.start, spec.shape[-1]
    return region[0].start * row, None
