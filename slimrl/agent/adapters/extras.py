"""Packages that only some recipes need."""

import importlib
from types import ModuleType


def extra(package: str) -> ModuleType:
    """
    Args:
        package: the one to import; the extra of pyproject.toml that has it is named like it.

    Raises:
        ValueError: it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        install = f"pip install -c requirements/lock.txt -e '.[{package}]'"
        raise ValueError(f"needs the package {package}. Install it with: {install}") from error
