"""The user's modules: which one a wrong path may mean, and which one Python's own hides."""

import sys
import sysconfig
from pathlib import Path

from slimrl.config.problems import closest


def near_module(module: str) -> str:
    """` Did you mean X?`, where a module of the user has nearly that path, or nearly its last name; else empty."""
    modules: dict[str, str] = {}
    for folder in _own_folders():
        for file in (*folder.glob("*.py"), *folder.glob("*/*.py")):
            name = ".".join(file.relative_to(folder).with_suffix("").parts)
            if all(part.isidentifier() and part != "__init__" for part in name.split(".")):
                modules.setdefault(name, name.rpartition(".")[2])
    last = module.rpartition(".")[2]
    if last not in modules.values():
        if (meant := closest(module, modules, cutoff=0.75)) is not None:
            return f" Did you mean {meant}?"
        last = closest(last, modules.values(), cutoff=0.85) or last
    meant = next((name for name in modules if modules[name] == last), None)
    return "" if meant is None else f" Did you mean {meant}?"


def hidden_file(module: str, found: Path | None) -> Path | None:
    """The user's file with the name of one of Python's own modules, if another file of that name is imported.

    Args:
        found: the file that is imported; None if there is none.
    """
    if module not in sys.stdlib_module_names or found is None:
        return None
    files = [folder / f"{module}.py" for folder in _own_folders()]
    return next((file for file in files if file.is_file() and file.resolve() != found.resolve()), None)


def hidden_text(file: Path) -> str:
    return f"{file.stem} is Python's own module, which is found instead of {file}. Rename the file."


def _own_folders() -> list[Path]:
    """Folders of `sys.path` that hold neither Python's own modules nor installed packages, the current one as `.`."""
    here, library = Path.cwd(), Path(sysconfig.get_path("stdlib")).resolve()
    folders = [folder for folder in dict.fromkeys(Path(path).resolve() for path in sys.path) if folder.is_dir()]
    own = [
        folder
        for folder in folders
        if library not in (folder, *folder.parents) and folder.name not in ("site-packages", "dist-packages")
    ]
    return [Path() if folder == here else folder for folder in own]
