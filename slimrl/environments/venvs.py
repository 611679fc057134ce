"""Virtual environments of environments: where they are, and how they are made."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from slimrl.environments.catalogue import CONTAINER_COMMANDS, ENVIRONMENTS, Entry

FOLDER_VARIABLE = "SLIMRL_ENVIRONMENTS"
"""Environment variable that names the folder of all of them"""
_COMPLETE = "complete"
"""File that says which lock a virtual environment was made from"""
_INSTALL_S = 1800.0


def venvs_folder() -> Path:
    """Where `slimrl-tools environment install` puts them: beside the packages of this interpreter by default."""
    return Path(os.environ.get(FOLDER_VARIABLE) or Path(sys.prefix) / "environments")


def venv_python(name: str) -> Path:
    """The interpreter of a virtual environment.

    Args:
        name: of an environment that is installed, or the folder of any virtual environment.

    Raises:
        ValueError: there is none, or it was made from an older lock.
    """
    if (entry := ENVIRONMENTS.get(name)) is not None:
        if why := why_not_here(entry):
            raise ValueError(f"{name}: {why}. Run: slimrl-tools environment install {name}")
        return venvs_folder() / name / "bin" / "python"
    python = Path(name) / "bin" / "python"
    if not python.exists():
        known = ", ".join(ENVIRONMENTS)
        raise ValueError(f"{name}: neither an environment that slimrl knows ({known}) nor a folder with bin/python.")
    return python.absolute()


def why_not_here(entry: Entry) -> str:
    """Why an environment does not work on this machine; empty if it does."""
    if missing := [program for program in entry.programs if shutil.which(program) is None]:
        return f"needs {', '.join(missing)}, which is not on PATH"
    if entry.containers and not any(map(shutil.which, CONTAINER_COMMANDS)):
        return f"needs {' or '.join(CONTAINER_COMMANDS)}, neither of which is on PATH"
    folder = venvs_folder() / entry.name
    if not (folder / _COMPLETE).is_file():
        return "not installed"
    return (
        "" if (folder / _COMPLETE).read_text() == entry.lock.read_text() else "installed by another version of slimrl"
    )


def install(entry: Entry) -> Path:
    """Make the virtual environment of an entry, in place of an older one; returns its folder.

    Raises:
        ValueError: a package cannot be installed.
    """
    folder = venvs_folder() / entry.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=_INSTALL_S)
        subprocess.run(_installer(folder, entry.lock), check=True, timeout=_INSTALL_S)
    except (subprocess.SubprocessError, OSError) as error:
        raise ValueError(f"{entry.name}: its packages could not be installed: {error}") from error
    shutil.copyfile(entry.lock, folder / _COMPLETE)
    return folder


def _installer(folder: Path, lock: Path) -> list[str]:
    """uv where there is one, which is faster, or this interpreter's pip."""
    python, given = str(folder / "bin" / "python"), ["--no-deps", "--requirement", str(lock)]
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    if uv is not None:
        return [uv, "pip", "install", "--quiet", "--compile-bytecode", "--python", python, *given]
    return [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", *given]
