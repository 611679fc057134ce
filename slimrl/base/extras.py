"""Packages that only some recipes need, each in an extra of pyproject.toml."""

import importlib
import importlib.util
from types import ModuleType


def extra(package: str) -> ModuleType:
    """
    Args:
        package: the one to import; the extra of pyproject.toml that has it is named like it.

    Raises:
        ValueError: it is not installed.
    """
    needs_extra(package, package)
    return importlib.import_module(package)


def needs_extra(package: str, extra: str) -> None:
    """Raises ValueError if a package is not installed; says which extra has it."""
    if importlib.util.find_spec(package) is None:
        install = f"pip install -c requirements/lock.txt -e '.[{extra}]'"
        raise ValueError(f"needs the package {package.replace('_', '-')}. Install it with: {install}")
