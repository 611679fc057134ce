"""Folders that a run writes into, tried before anything starts."""

import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from slimrl.config.load import LoadedRecipe
from slimrl.config.problems import Problem, Violation
from slimrl.config.schema import TransportName


def folder_problems(loaded: LoadedRecipe) -> list[Problem]:
    """Folders that cannot be made or written on this machine; nothing is left in them."""
    return [loaded.problem(key, message) for key, message in _folder_violations(loaded)]


def _folder_violations(loaded: LoadedRecipe) -> Iterator[Violation]:
    recipe = loaded.recipe
    folders = {"run.dir": recipe.run.dir}
    if loaded.command in ("train", "resync bench"):
        transport = recipe.resync.transport
        if transport in (TransportName.disk, TransportName.delta):
            folders["resync.dir"] = recipe.resync.dir
        if transport is TransportName.delta:
            folders["resync.local_dir"] = recipe.resync.local_dir
    for key, folder in folders.items():
        if folder and (reason := why_not_writable(Path(folder))):
            yield key, f"{folder} cannot be written: {reason}."


def why_not_writable(folder: Path) -> str:
    """The reason of the system; empty where the folder can be made and a file in it. What this makes is removed."""
    folder = folder.absolute()
    made: list[Path] = []
    try:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        for path in reversed(missing):
            path.mkdir(exist_ok=True)
            made.append(path)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return error.strerror or str(error)
    finally:
        for path in reversed(made):
            # Another process may have put something there by now.
            with suppress(OSError):
                path.rmdir()
