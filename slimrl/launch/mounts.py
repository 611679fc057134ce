"""Paths of a recipe that a job's container would not find, since it sees a part of the file systems alone."""

from collections.abc import Iterator
from pathlib import Path

from slimrl.config.problems import Violation
from slimrl.config.schema import Recipe


def unmounted_paths(recipe: Recipe, log_dir: Path, mounts: str) -> Iterator[Violation]:
    """Key and warning of each path outside of what is mounted.

    Args:
        mounts: as pyxis takes them: `SRC:DST,...`, or `PATH` alone for both, each perhaps with `:FLAGS`.
    """
    inside = [part.split(":")[:2][-1] for part in mounts.split(",") if part]
    seen = [Path.cwd(), log_dir.absolute(), *map(Path, inside)]
    named = {
        "run.dir": recipe.run.dir,
        "model.path": recipe.model.path,
        "model.megatron": recipe.model.megatron,
        "resync.dir": recipe.resync.dir,
        "resync.local_dir": recipe.resync.local_dir,
        "data.train": recipe.data.train,
        **{f"data.eval.{name}": path for name, path in recipe.data.eval.items()},
    }
    for key, text in named.items():
        path = Path(text).absolute()
        if text and not any(folder in (path, *path.parents) for folder in seen):
            yield key, f"{text}: not in the container. Mount its folder: --container-mounts SRC:DST,..."
