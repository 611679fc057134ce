"""The load of the experts over the steps, where a run recorded it (docs/observing.md#expert-load)."""

from pathlib import Path
from typing import Any

import numpy as np

from slimrl.observability.page.packed import compressed, quantity
from slimrl.observability.run_files import Run

MOST_STEPS = 60
"""Largest number of steps that are shown of a run, spread evenly"""


def expert_load(run: Run) -> str:
    """Packed `steps`, `layers` and `loads`, one for each step; empty if nothing was recorded.

    A load is the packed tokens of each expert over the mean of its layer, layer by layer. `experts` says how many a
    layer has at most; a layer with fewer has unknown loads at its end.

    Raises:
        ValueError: a file cannot be read; names it.
    """
    files = sorted(run.folder.expert_load.glob("step_*.parquet"))
    if not files:
        return ""
    chosen = [files[place] for place in sorted({round(at) for at in np.linspace(0, len(files) - 1, MOST_STEPS)})]
    tables = [_read(path) for path in chosen]
    layers = sorted({layer for _, tokens in tables for layer in tokens})
    experts = max(len(counts) for _, tokens in tables for counts in tokens.values())
    return compressed(
        {
            "steps": [step for step, _ in tables],
            "layers": layers,
            "experts": experts,
            "loads": [quantity(_loads(tokens, layers, experts)) for _, tokens in tables],
        }
    )


def _read(path: Path) -> tuple[int, dict[int, list[int]]]:
    """(step, tokens of each expert by layer)."""
    import pyarrow
    import pyarrow.parquet

    try:
        rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
        return rows[0]["step"], {row["layer"]: row["tokens"] for row in rows}
    except (pyarrow.ArrowException, OSError, IndexError, KeyError) as error:
        raise ValueError(f"{path}: no file of experts' loads: {error!r}") from error


def _loads(tokens: dict[int, list[int]], layers: list[int], experts: int) -> np.ndarray:
    """float64 [layers * experts], tokens over the layer's mean; NaN where there is no such expert."""
    load_LE = np.full((len(layers), experts), np.nan)
    for place, layer in enumerate(layers):
        if counts := tokens.get(layer):
            load_LE[place, : len(counts)] = np.array(counts) / max(np.mean(counts), 1e-9)
    return load_LE.ravel()
