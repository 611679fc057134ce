"""Tables and JSON files of what a benchmark has measured."""

import json
import os
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.table import Table


def make_table(title: str, columns: Iterable[str], *, labels: int = 1) -> Table:
    """A table whose first `labels` columns are text; the others are numbers."""
    table = Table(title=title)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < labels else "right")
    return table


def write_figures(file: Path | None, figures: Mapping[str, Any]) -> None:
    """Write figures as JSON, with the machine, and make the folder; nothing without a file."""
    if file is None:
        return
    machine = {
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "system": platform.platform(),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({**figures, "machine": machine}, indent=1) + "\n")
