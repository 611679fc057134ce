"""podman with an image of this Debian's own Python and bash, so that nothing is downloaded."""

import io
import shutil
import subprocess
import tarfile
from collections.abc import Iterable
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
    """With an image of the programs; skips the test where podman or runc is missing, or this is not Debian."""
    wrapper = podman_command(tmp_path_factory)
    _import_image()
    return SandboxConfig(backend=SandboxBackend.container, command=wrapper, image=IMAGE, limits=limits)


def podman_command(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of a command that is podman's; skips the test where podman or runc is missing, or this is not Debian."""
    if any(shutil.which(command) is None for command in ("podman", "runc", "catatonit")):
        pytest.skip("needs podman, runc and catatonit")
    if any(not Path(program).exists() for program in PROGRAMS):
        pytest.skip("the image is made of a Debian's programs")
    wrapper = tmp_path_factory.mktemp("podman") / "podman"
    wrapper.write_text(WRAPPER)
    wrapper.chmod(0o755)
    return str(wrapper)


@cache
def _import_image() -> None:
    """Raises CalledProcessError if podman refuses the image."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", dereference=True) as archive:
        for file in sorted(programs_with_libraries(PROGRAMS) | library_files()):
            archive.add(file, recursive=False)
    subprocess.run(["podman", "import", "-", IMAGE], input=buffer.getvalue(), check=True, capture_output=True)


def library_files() -> set[str]:
    """Python's standard library without its larger parts, and the libraries that it loads."""
    version = _said("/usr/bin/python3", "-c", "import sys; print('python%d.%d' % sys.version_info[:2])").strip()
    left_out = {"test", "idlelib", "lib2to3", "__pycache__", "dist-packages"}
    found = [file for file in Path("/usr/lib", version).rglob("*") if file.is_file() and not left_out & set(file.parts)]
    return {*map(str, found), *programs_with_libraries([str(file) for file in found if file.suffix == ".so"])}


def programs_with_libraries(programs: Iterable[str]) -> set[str]:
    libraries = {word for name in programs for word in _said("ldd", name).split() if word.startswith("/")}
    return {*programs, *libraries}


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout
