"""Packages of which some modules are imported without what the package itself imports."""

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType


def make_bare(names: Sequence[str], environment: str) -> None:
    """Put empty packages in the place of these, which find their modules and import nothing by themselves.

    Args:
        names: of packages, each after those that hold it.
        environment: whose lock has them.

    Raises:
        ValueError: a package is not installed.
    """
    for name in names:
        if name in sys.modules:
            continue
        parent, _, last = name.rpartition(".")
        if parent:
            folders = [str(Path(folder, last)) for folder in sys.modules[parent].__path__]
        else:
            spec = find_spec(name)
            if spec is None or spec.submodule_search_locations is None:
                raise ValueError(f"{name} is not installed: install slimrl/environments/locks/{environment}.txt")
            folders = list(spec.submodule_search_locations)
        package = ModuleType(name)
        package.__path__ = folders
        sys.modules[name] = package
