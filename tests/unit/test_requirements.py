"""The pins in requirements/ agree with each other and with the images, and a Python 3.12 is found or asked for."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "requirements"
PLACES = ("/usr/bin", "/usr/local/bin", "/bin")


def pins(file: str) -> dict[str, str]:
    text = (ROOT / file).read_text()
    return {
        canonicalize_name(name): version for name, version in re.findall(r"^([\w.-]+)(?:\[.*\])?==(\S+)", text, re.M)
    }


def test_every_package_that_is_asked_for_is_pinned_to_the_version_of_the_tests():
    lock = pins("requirements/lock.txt")
    for name in ("slimrl.txt", "cpu.txt", "dev.txt", "no-deps.txt", "mcp.txt", "gymnasium.txt", "openenv.txt"):
        lines = [line for line in (REQUIREMENTS / name).read_text().splitlines() if line and not line.startswith("#")]
        wanted = pins(f"requirements/{name}")
        assert len(wanted) == len(lines)
        assert wanted == {package: lock[package] for package in wanted}


def test_trl_is_compared_with_the_packages_of_the_tests():
    lock, trl = pins("requirements/lock.txt"), pins("requirements/trl.txt")
    assert {"torch", "transformers", "accelerate"} <= trl.keys() & lock.keys()
    assert all(trl[name] == lock[name] for name in trl.keys() & lock.keys())
    assert trl["trl"] == pins("requirements/peers.txt")["trl"]


def test_a_gpu_machine_gets_the_versions_of_the_tests():
    lock, gpu = pins("requirements/lock.txt"), pins("requirements/gpu.txt")
    assert {name: gpu[name] for name in ("sglang", "megatron-core")} == {
        name: lock[name] for name in ("sglang", "megatron-core")
    }
    image = (ROOT / "docker" / "Dockerfile.cuda").read_text()
    installed = {canonicalize_name(name): version for name, version in re.findall(r"([\w.-]+)==([\w.]+)", image)}
    wanted = pins("requirements/slimrl.txt") | gpu
    for name in installed.keys() & wanted.keys():
        assert installed[name] == wanted[name], name
    assert {"megatron-core", "transformer-engine", "ray"} <= installed.keys()
    assert f"sglang:v{gpu['sglang']}" in image


def test_the_package_declares_what_requirements_hold():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    declared = project["tool"]["setuptools"]["dynamic"]
    files = [declared["dependencies"]["file"], *(extra["file"] for extra in declared["optional-dependencies"].values())]
    assert sorted(declared["optional-dependencies"]) == ["cpu", "dev", "gpu", "gymnasium", "mcp", "openenv"]
    assert all((ROOT / file).is_file() for (file,) in files)
    assert project["project"]["requires-python"] == ">=3.12,<3.13"


def found_python(home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = f"{home / 'shims'}:/usr/bin:/bin"
    return subprocess.run(
        ["sh", REQUIREMENTS / "find_python.sh"], env={"HOME": str(home), "PATH": path, **environment},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def put(file: Path, script: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return file


def test_a_shim_that_fails_is_passed_over_for_the_version_behind_it(tmp_path):
    put(tmp_path / "shims" / "python3.12", "echo 'command not found' >&2; exit 127")
    for name in ("python3", "python"):
        put(tmp_path / "shims" / name, "exit 1")
    real = put(tmp_path / ".pyenv" / "versions" / "3.12.4" / "bin" / "python3.12", "exit 0")
    found = found_python(tmp_path)
    if not any(Path(place, "python3.12").exists() for place in PLACES):
        assert (found.stdout.strip(), found.returncode) == (str(real), 0)
    other = put(tmp_path / "mine", "exit 0")
    assert found_python(tmp_path, PYTHON=str(other)).stdout.strip() == str(other)


@pytest.mark.skipif(any(Path(place, "python3.12").exists() for place in PLACES), reason="there is one")
def test_without_a_python_3_12_it_is_said_what_to_install(tmp_path):
    for name in ("python3.12", "python3", "python"):
        put(tmp_path / "shims" / name, "exit 1")
    found = found_python(tmp_path, CONDA_PREFIX=str(tmp_path))
    assert (found.returncode, found.stdout) == (1, "")
    assert "slimrl runs on Python 3.12, and none was found." in found.stderr
    for way in ("apt install python3.12", "pyenv install 3.12", "uv python install 3.12", "make setup PYTHON="):
        assert way in found.stderr
    found = found_python(tmp_path, PYTHON="/nowhere/python")
    assert found.returncode == 1
    assert found.stderr.startswith("PYTHON=/nowhere/python is no Python 3.12 with the modules venv and ensurepip.")
