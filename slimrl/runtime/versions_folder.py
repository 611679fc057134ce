"""The owner of a folder in `resync.dir`: it is named after a run, and another run may have the same name."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from slimrl.base.folder_lock import folder_lock
from slimrl.config.load import LoadedRecipe
from slimrl.config.schema.resync import TransportName

OWNER_FILE = "run"
"""Name of the file with the path of the run's folder."""


@contextmanager
def versions_folder(loaded: LoadedRecipe, *, wait_s: float, say: Callable[[str], None]) -> Iterator[None]:
    """Lock `resync.dir/NAME` for this run, if its transport writes versions there.

    Raises:
        ValueError: it belongs to a run with another folder, or another process uses it.
    """
    recipe = loaded.recipe
    if recipe.resync.transport not in (TransportName.disk, TransportName.delta) or not recipe.resync.dir:
        yield
        return
    folder = Path(recipe.resync.dir) / recipe.run.name
    folder.mkdir(parents=True, exist_ok=True)
    run = (Path(recipe.run.dir) / recipe.run.name).resolve()
    with folder_lock(folder, wait_s=wait_s, say=say):
        owner = folder / OWNER_FILE
        other = Path(owner.read_text().strip()) if owner.is_file() else run
        if other != run and other.is_dir():
            raise ValueError(
                f"{loaded.where('resync.dir')}: resync.dir: {folder} holds the versions of the run in {other}, which "
                "this one would remove. Give another run.name or another resync.dir."
            )
        owner.write_text(f"{run}\n")
        yield
