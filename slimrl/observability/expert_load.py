"""How many tokens each expert of each layer got in a step, as a Parquet file a step (docs/observing.md#expert-load)."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from slimrl.base.atomic import atomic_file


def write_expert_load(path: Path, step: int, load: Mapping[int, np.ndarray]) -> None:
    """Write a row for each layer, in a file that replaces one that is there; makes the folder.

    Args:
        load: int64 [experts] by layer.

    Raises:
        OSError: the file could not be written; names it.
    """
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table(
        {
            "step": pyarrow.array([step] * len(load), pyarrow.int32()),
            "layer": pyarrow.array(list(load), pyarrow.int32()),
            "tokens": pyarrow.array(list(load.values()), pyarrow.list_(pyarrow.int64())),
        }
    )
    path.parent.mkdir(exist_ok=True)
    with atomic_file(path) as stream:
        pyarrow.parquet.write_table(table, stream)
