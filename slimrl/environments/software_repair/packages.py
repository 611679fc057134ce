"""The packages into which bugs are planted: published sources, pinned by their hashes in packages.txt, cut down to the
package's code and its tests. No compiled code, and nothing to install but pytest."""

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

LIST = Path(__file__).with_name("packages.txt")
CONFIG = "pytest.ini"
"""The only settings of a base folder's suite"""
DOWNLOAD_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Package:
    """What of a source distribution becomes a base folder."""

    name: str
    code: tuple[str, ...]
    """Modules and packages, at the top of the distribution or in `src`; they move to the top."""
    tests: tuple[str, ...]
    without: tuple[str, ...] = ()
    """Files that are left out: their tests need more than pytest, or a network, or depend on the folder's name."""


PACKAGES = (
    Package(name="toolz", code=("toolz", "tlz"), tests=("toolz/tests",)),
    Package(name="cachetools", code=("cachetools",), tests=("tests",)),
    Package(name="inflection", code=("inflection",), tests=("test_inflection.py",)),
    Package(name="parse", code=("parse.py",), tests=("tests",)),
    Package(
        name="humanize",
        code=("humanize",),
        tests=("tests/test_filesize.py", "tests/test_lists.py", "tests/test_number.py"),
    ),
    Package(name="idna", code=("idna",), tests=("tests",)),
    Package(name="mistune", code=("mistune",), tests=("tests",)),
    Package(
        name="boltons",
        code=("boltons",),
        tests=("tests",),
        without=("tests/conftest.py", "tests/test_socketutils.py", "tests/test_fileutils.py"),
    ),
    Package(name="tabulate", code=("tabulate",), tests=("test",)),
    Package(name="more-itertools", code=("more_itertools",), tests=("tests",)),
)


def pins() -> dict[str, tuple[str, str]]:
    """Name -> version and sha256 of the source distribution."""
    found = {}
    for line in LIST.read_text().splitlines():
        requirement, _, digest = line.partition(" --hash=sha256:")
        name, _, version = requirement.partition("==")
        found[name] = version, digest.strip()
    return found


def make_base(package: Package, sources: Path, bases: Path) -> Path:
    """The base folder of a package, made if it is not there.

    Args:
        sources: folder for source distributions; what is missing is downloaded.

    Raises:
        ValueError: the download fails, or is not what packages.txt names.
    """
    version, digest = pins()[package.name]
    base = bases / f"{package.name}-{version}"
    if base.exists():
        return base
    archive = _source(package.name, version, digest, sources)
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(archive) as opened:
            opened.extractall(folder, filter="data")
        (top,) = Path(folder).iterdir()
        part = bases / f".{base.name}"
        shutil.rmtree(part, ignore_errors=True)
        for name in (*package.code, *package.tests):
            source = top / name if (top / name).exists() else top / "src" / name
            _copy(source, part / name)
        for name in package.without:
            (part / name).unlink()
        (part / CONFIG).write_text("[pytest]\n")
        part.rename(base)
    return base


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
        shutil.copytree(source, target, ignore=ignore, dirs_exist_ok=True)
    else:
        shutil.copy(source, target)


def _source(name: str, version: str, digest: str, sources: Path) -> Path:
    sources.mkdir(parents=True, exist_ok=True)
    archive = sources / f"{name}-{version}.tar.gz"
    if not archive.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        command += ["--dest", str(sources), f"{name}=={version}"]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=DOWNLOAD_S)
        except subprocess.CalledProcessError as error:
            said = error.stderr.strip().rsplit("\n", 1)[-1]
            raise ValueError(
                f"{name}=={version} cannot be downloaded: {said}. Put {archive.name} into {sources}."
            ) from error
    if hashlib.sha256(archive.read_bytes()).hexdigest() != digest:
        raise ValueError(f"{archive} is not the file that packages.txt names: delete it")
    return archive
