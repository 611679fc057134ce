"""Writes the page: one HTML file with its data, its scripts and its style."""

import base64
import hashlib
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from slimrl.base.atomic import atomic_file
from slimrl.observability.page.conversations import Conversations, conversations
from slimrl.observability.page.experts import expert_load
from slimrl.observability.page.findings import findings
from slimrl.observability.page.packed import script_json
from slimrl.observability.page.panels import curves, panels
from slimrl.observability.page.settings import differences, seed_families, setting_rows
from slimrl.observability.page.times import times
from slimrl.observability.run_files import Run, read_runs
from slimrl.observability.run_state import duration, machine, model, state

MOST_TRAJECTORIES = 2_000
"""Default of the number of trajectories in a page"""
_FOLDER = Path(__file__).parent
SCRIPTS = ("base.js", "overview.js", "curves.js", "time.js", "table.js", "conversation.js", "tokens.js", "experts.js",
           "start.js")  # fmt: skip
"""Files of the page's own script, in their order"""


def write_page(
    folders: Sequence[Path],
    out: Path,
    title: str = "",
    most: int = MOST_TRAJECTORIES,
    seen: Callable[[int, int], None] = lambda done, total: None,
) -> Conversations:
    """Write the page of one run, or of several.

    Args:
        most: number of trajectories that the page holds.
        seen: see `conversations`.

    Returns:
        The trajectories that are in it.

    Raises:
        ValueError: a file of a run cannot be read; names it.
    """
    runs = read_runs(list(folders))
    held = conversations(runs, most, seen)
    loads = {number: load for number, run in enumerate(runs) if (load := expert_load(run))}
    title = title or ", ".join(run.name for run in runs)
    plotly = files("plotly").joinpath("package_data", "plotly.min.js").read_text(encoding="utf-8")
    scripts = [plotly, '"use strict";\n' + "\n".join((_FOLDER / name).read_text() for name in SCRIPTS)]
    environment = Environment(loader=FileSystemLoader(_FOLDER), autoescape=True, undefined=StrictUndefined)
    stream = environment.get_template("page.html").stream(
        title=title,
        policy=_policy(scripts),
        style=(_FOLDER / "page.css").read_text(),
        scripts=scripts,
        data=script_json(page_data(runs, held, list(loads), title)),
        loads=loads,
        parts=held.parts,
    )
    with atomic_file(out) as file:
        for text in stream:
            file.write(text.encode())
    return held


def page_data(runs: Sequence[Run], held: Conversations, with_load: list[int], title: str) -> dict[str, Any]:
    """All that the page shows but what is packed.

    Args:
        with_load: numbers of the runs that recorded the load of experts.
    """
    return {
        "title": title,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "runs": [_run_data(run, family) for run, family in zip(runs, seed_families(list(runs)), strict=True)],
        "differences": differences(list(runs)) if len(runs) > 1 else [],
        "panels": panels(runs),
        "expert_runs": with_load,
        "trajectories": {"columns": held.columns, "shown": len(held.parts), "found": held.found},
    }


def _run_data(run: Run, family: int) -> dict[str, Any]:
    return {
        "name": run.name,
        "path": str(run.folder.path),
        "family": family,
        "seed": run.settings.get("seed"),
        "state": state(run),
        "duration": duration(run),
        "model": model(run),
        "machine": machine(run),
        "settings": setting_rows(run),
        "findings": findings(run),
        "curves": curves(run),
        "times": times(run),
    }


def _policy(scripts: Sequence[str]) -> str:
    """Content-Security-Policy: these scripts alone, no network; Plotly sets styles of its own, and draws images."""
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
