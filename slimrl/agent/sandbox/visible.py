"""What of the host's files a sandbox shows, read-only: the system's programs, the interpreter, and its packages.

/usr and the Python installation are shown where they are, and the packages of the warm interpreter at PACKAGES. What
lies within these and is none of them is hidden: other packages, slimrl and its repository.
"""

import os
import re
import sys
import sysconfig
from collections.abc import Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

PACKAGES = "/packages"
VENV = "/python"
"""A virtual environment of the interpreter with the packages: its programs are the first on PATH."""
_ROOT_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ETC = ("ld.so.cache", "alternatives")
_REPOSITORY = Path(__file__).resolve().parents[3]
"""Folder that holds the package slimrl."""


def interpreter() -> Path:
    """The Python that runs inside: the one outside, without its virtual environment."""
    return Path(sys.executable).resolve()


def arguments(packages: list[str]) -> list[str]:
    """Arguments of bwrap for the files that a sandbox sees; `packages` are distributions with what they need."""
    shown = [Path("/usr")]
    prefix = Path(sys.base_prefix).resolve()
    if not prefix.is_relative_to("/usr"):
        shown.append(prefix)
    result = [
        word for folder in (Path(PACKAGES), Path("/etc"), *reversed(prefix.parents)) for word in ("--dir", str(folder))
    ]
    result += [word for folder in shown for word in ("--ro-bind", str(folder), str(folder))]
    for name in _ROOT_LINKS:
        path = Path("/", name)
        if path.is_symlink():
            result += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            result += ["--ro-bind", str(path), str(path)]
    for name in _ETC:
        result += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for path in _hidden(shown):
        result += ["--tmpfs", str(path), "--remount-ro", str(path)]
    for path in package_paths(packages):
        result += ["--ro-bind", str(path), f"{PACKAGES}/{path.name}"]
    return result


def installed(packages: Sequence[str]) -> list[str]:
    """Names of the packages that are installed, and of the distributions that they need."""
    found: dict[str, Distribution] = {}
    waiting = list(packages)
    while waiting:
        name = waiting.pop(0)
        if name in found:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            continue
        for requirement in found[name].requires or ():
            needed = re.match(r"[\w.-]+", requirement)
            if needed and ";" not in requirement:
                waiting.append(needed[0])
    return list(found)


def package_paths(packages: list[str]) -> list[Path]:
    """Folders and modules of distributions."""
    paths = set()
    for name in packages:
        one = distribution(name)
        tops = {file.parts[0] for file in one.files or ()}
        paths |= {Path(str(one.locate_file(top))).resolve() for top in tops if top not in ("..", "__pycache__", "/")}
    return sorted(path for path in paths if path.exists())


def environment_files(packages: list[str]) -> dict[str, str]:
    """Path within VENV -> content of the files that make it a virtual environment, with the packages' own commands."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    settings = f"home = {interpreter().parent}\ninclude-system-site-packages = false\n"
    files = {"pyvenv.cfg": settings + f"version = {version.removeprefix('python')}\n"}
    for name in packages:
        for entry in distribution(name).entry_points.select(group="console_scripts"):
            module, _, function = entry.value.partition("[")[0].strip().partition(":")
            first = function.split(".")[0]
            files[f"bin/{entry.name}"] = (
                f"#!{VENV}/bin/python3\nimport sys\n\nfrom {module} import {first}\n\nsys.exit({function}())\n"
            )
    return files


def environment_links() -> dict[str, str]:
    """Path within VENV -> what it is a link to."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    links = {f"bin/{name}": str(interpreter()) for name in ("python", "python3", version)}
    return links | {f"lib/{version}/site-packages": PACKAGES}


def _hidden(shown: list[Path]) -> list[Path]:
    """Folders within those shown that modules of the host are imported from, the standard library's excepted."""
    standard = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")}
    standard |= {folder / "lib-dynload" for folder in standard}
    folders = {Path(path).resolve() for path in sys.path if path} | {_REPOSITORY}
    folders |= {Path(sysconfig.get_path("purelib", vars={"base": sys.base_prefix})).resolve()}
    within = {
        folder
        for folder in folders
        for top in shown
        if folder.is_dir() and folder != top and folder.is_relative_to(top)
    }
    return sorted(within - standard)
