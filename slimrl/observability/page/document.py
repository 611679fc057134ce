"""Writes the page: one HTML file with its data, its scripts and its style."""

import base64
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from slimrl.base.atomic import atomic_file
from slimrl.observability.page.conversations import Conversations, Known, conversations
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
           "start.js", "follow.js")  # fmt: skip
"""Files of the page's own script, in their order"""


@dataclass(frozen=True)
class Contents:
    """What a page shows."""

    title: str
    data: dict[str, Any]
    """All but what is packed"""
    parts: dict[str, str]
    """What is packed, by its name in `data`"""


def page_contents(
    folders: Sequence[Path],
    title: str,
    most: int,
    known: Known | None = None,
    seen: Callable[[int, int], None] = lambda done, total: None,
) -> Contents:
    """Read what the page of one run, or of several, shows.

    Args:
        title: empty for the runs' names.
        most: number of trajectories that the page holds.
        known, seen: see `conversations`.

    Raises:
        ValueError: a folder is none of a run, or a file of a run cannot be read; names it.
    """
    runs = read_runs(list(folders))
    held = conversations(runs, most, known, seen)
    loads = {number: load for number, run in enumerate(runs) if (load := expert_load(run))}
    title = title or ", ".join(run.name for run in runs)
    parts = {f"e{number}": load for number, load in loads.items()}
    for name, (conversation, tokens) in zip(held.columns.get("part", []), held.parts, strict=True):
        parts |= {f"c{name}": conversation, **({f"t{name}": tokens} if tokens else {})}
    return Contents(title, page_data(runs, held, list(loads), title), parts)


def write_page(
    folders: Sequence[Path],
    out: Path,
    title: str = "",
    most: int = MOST_TRAJECTORIES,
    seen: Callable[[int, int], None] = lambda done, total: None,
) -> Contents:
    """Write the page of one run, or of several; the arguments are those of `page_contents`."""
    contents = page_contents(folders, title, most, seen=seen)
    with atomic_file(out) as file:
        for text in page_texts(contents.title, contents.data, contents.parts):
            file.write(text.encode())
    return contents


def page_texts(title: str, data: dict[str, Any], parts: Mapping[str, str], connect: str = "'none'") -> Iterator[str]:
    """The page in pieces.

    Args:
        parts: those that the page has in itself.
        connect: where the page may ask for more, in the words of a Content-Security-Policy.
    """
    plotly = files("plotly").joinpath("package_data", "plotly.min.js").read_text(encoding="utf-8")
    scripts = [plotly, '"use strict";\n' + "\n".join((_FOLDER / name).read_text() for name in SCRIPTS)]
    environment = Environment(loader=FileSystemLoader(_FOLDER), autoescape=True, undefined=StrictUndefined)
    return environment.get_template("page.html").stream(
        title=title,
        policy=_policy(scripts, connect),
        style=(_FOLDER / "page.css").read_text(),
        scripts=scripts,
        data=script_json(data),
        parts=parts,
    )


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


def _policy(scripts: Sequence[str], connect: str) -> str:
    """Content-Security-Policy: these scripts alone; Plotly sets styles of its own, and draws images."""
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {connect}; "
        "base-uri 'none'; form-action 'none'"
    )
