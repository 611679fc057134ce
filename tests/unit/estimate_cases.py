"""Small layouts and engines whose resync is estimated."""

from slimrl.data.model_weights import EnginePlace, SourceLayout, SourcePiece, TensorSpec

ROWS, COLUMNS = 1024, 256
NBYTES = 2 * ROWS * COLUMNS
"""Bytes of a matrix"""


def layout(holders: list[tuple[int, ...]], tensors: int = 1) -> SourceLayout:
    """Matrices whose rows are cut into as many equal pieces as there are sets of ranks."""
    step = ROWS // len(holders)
    pieces = tuple(
        SourcePiece(region=(slice(i * step, (i + 1) * step), slice(0, COLUMNS)), holders=ranks)
        for i, ranks in enumerate(holders)
    )
    return {
        TensorSpec(name=f"layer{i}.weight", shape=(ROWS, COLUMNS), dtype="bfloat16"): pieces for i in range(tensors)
    }


def engine(name: str, *nodes: str, num_ranks: int = 1) -> EnginePlace:
    return EnginePlace(name=name, nodes=nodes, num_ranks=num_ranks)
