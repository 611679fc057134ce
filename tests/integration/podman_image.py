"""podman with an image of this Debian's own Python and bash, so that nothing is downloaded."""

import io
import shutil
import subprocess
import tarfile
from functools import cache
from pathlib import Path

import pytest

from slimrl.config.schema.agent import SandboxBackend, SandboxConfig, SandboxLimits

IMAGE = "localhost/slimrl-tests:latest"
_COMMANDS = ("/bin/bash", "/bin/sh", "/bin/cat", "/bin/sleep", "/bin/mkdir", "/bin/tar", "/usr/bin/id")
PROGRAMS = ("/usr/bin/python3", *_COMMANDS)
# Root without CAP_SYS_RESOURCE cannot raise the limits that podman sets by itself.
WRAPPER = """#!/bin/sh
[ "$1" = run ] || exec podman --runtime runc "$@"
shift
exec podman --runtime runc run --ulimit=nproc=4096:4096 "$@"
"""


def podman_config(tmp_path_factory: pytest.TempPathFactory, limits: SandboxLimits) -> SandboxConfig:
    """Skips the test where podman or runc is missing, or this is not Debian."""
    if any(shutil.which(command) is None for command in ("podman", "runc", "catatonit")):
        pytest.skip("needs podman, runc and catatonit")
    if any(not Path(program).exists() for program in PROGRAMS):
        pytest.skip("the image is made of a Debian's programs")
    _import_image()
    wrapper = tmp_path_factory.mktemp("podman") / "podman"
    wrapper.write_text(WRAPPER)
    wrapper.chmod(0o755)
    return SandboxConfig(backend=SandboxBackend.container, command=str(wrapper), image=IMAGE, limits=limits)


@cache
def _import_image() -> None:
    """Raises CalledProcessError if podman refuses the image."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", dereference=True) as archive:
        for file in sorted(_files()):
            archive.add(file, recursive=False)
    subprocess.run(["podman", "import", "-", IMAGE], input=buffer.getvalue(), check=True, capture_output=True)


def _files() -> set[str]:
    """The programs, the libraries that they load, and Python's standard library without its larger parts."""
    version = _said("/usr/bin/python3", "-c", "import sys; print('python%d.%d' % sys.version_info[:2])").strip()
    library = Path("/usr/lib") / version
    left_out = {"test", "idlelib", "lib2to3", "__pycache__", "dist-packages"}
    modules = [file for file in library.rglob("*") if file.is_file() and not left_out & set(file.parts)]
    loading = [*PROGRAMS, *(str(file) for file in modules if file.suffix == ".so")]
    libraries = {word for name in loading for word in _said("ldd", name).split() if word.startswith("/")}
    return {*PROGRAMS, *map(str, modules), *libraries}


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout
