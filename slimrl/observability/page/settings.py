"""A run's settings beside where they come from, and which runs differ in their seed alone."""

import json
from pathlib import PurePath
from typing import Any

from slimrl.config.schema.types import MISSING
from slimrl.observability.run_files import DEFAULTS, Run

OF_ONE_RUN = ("seed", "run", "tracking", "checkpoint")
"""Settings and sections in which the seeds of one recipe may differ"""


def setting_rows(run: Run) -> list[dict[str, Any]]:
    """`key`, `value`, `default` (null if there is none), `from` and `kind` of every setting.

    `kind` is `command line`, `recipe`, `base` (a file that the recipe inherits from) or `default`.
    """
    origins: dict[str, str] = run.starts[-1].get("config_origins", {}) if run.starts else {}
    recipe = _recipe_file(run)
    rows = []
    for key, value in run.settings.items():
        origin = origins.get(key, "default")
        default = DEFAULTS.get(key, MISSING)
        rows.append(
            {
                "key": key,
                "value": _text(value),
                "default": None if default == MISSING else _text(default),
                "from": origin,
                "kind": _kind(origin, recipe),
            }
        )
    return rows


def _recipe_file(run: Run) -> str:
    """Path of the recipe in the newest command, empty if unknown."""
    command = run.starts[-1].get("command", []) if run.starts else []
    return next((word for word in command[1:] if word.endswith((".yaml", ".yml")) and "=" not in word), "")


def _kind(origin: str, recipe: str) -> str:
    if origin in ("default", "command line"):
        return origin
    file = origin.rpartition(":")[0] or origin
    return "recipe" if recipe and PurePath(recipe).match(file) else "base"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def seed_families(runs: list[Run]) -> list[int]:
    """Number of each run's family: runs of one family are seeds of one recipe.

    They agree in all settings but OF_ONE_RUN; below its own `run.dir` a path of one run is that of another.
    """
    keys = [_family_key(run) for run in runs]
    order = list(dict.fromkeys(keys))
    return [order.index(key) for key in keys]


def _family_key(run: Run) -> str:
    own = str(run.settings.get("run.dir", ""))
    rest = {key: value for key, value in run.settings.items() if key.split(".")[0] not in OF_ONE_RUN}
    text = json.dumps(rest, sort_keys=True, default=str)
    # A run without config.yaml is a family of its own.
    return text.replace(own, "...") if rest and own else text if rest else run.name


def differences(runs: list[Run]) -> list[dict[str, Any]]:
    """`key` and `values` (one for each run, null if it has none) of the settings in which runs differ."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    rows = []
    for key in keys:
        # A run of an earlier version lacks newer settings.
        found = [run.settings.get(key, DEFAULTS.get(key)) for run in runs]
        values = [None if value is None else _text(value) for value in found]
        if len(set(values)) > 1:
            rows.append({"key": key, "values": values})
    return rows
