"""The GPU suite runs on a CPU with small sizes, so that its tests are executed before a GPU is there to run them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
SUITE = ROOT / "tests" / "gpu"
NEEDS_SGLANG = SUITE / "two" / "test_replaced_engine.py"
"""The only one for two GPUs that does"""

ABSENT = (
    "ray", "sglang", "transformer_engine", "apex", "xdist", "pytest_timeout", "pytest_asyncio", "hypothesis",
    "pyarrow", "wandb", "jsonschema", "math_verify", "pydantic", "typer", "matplotlib", "fastapi", "openai", "mbridge",
    "einops", "dill", "PIL", "sentencepiece", "scipy", "pandas",
)  # fmt: skip
"""Packages that the bare machine of tier A lacks."""

BARE = f"""
import sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, *more):
        return None if name.partition(".")[0] in {ABSENT!r} else super().find_spec(name, *more)

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""


def run_suite(*files: Path, timeout_s: float, **environment: str) -> str:
    """The table of the tests in these files, started as their users do; all must pass."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *map(str, files)]
    done = subprocess.run(
        command,
        env={**os.environ, "SLIMRL_GPU_TESTS_ON_CPU": "1", **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    written = sum(len(re.findall(r"^def test_", file.read_text(), re.M)) for file in files)
    table = done.stdout.partition("what ran and what it proves, on a CPU")[2]
    assert len(re.findall(r"^(?:A|B|2 GPUs) +passed ", table, re.M)) >= written > 0
    assert not re.search(r"^(?:A|B|2 GPUs) +(?:skipped|failed|error) ", table, re.M)
    return table


@pytest.mark.full
def test_what_one_and_two_gpus_are_to_prove_runs_on_a_cpu_with_the_packages_of_a_bare_machine(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BARE)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH"), str(ROOT)]))
    files = [*(SUITE / "tier_a").glob("test_*.py"), *(set((SUITE / "two").glob("test_*.py")) - {NEEDS_SGLANG})]
    table = run_suite(*files, timeout_s=500, PYTHONPATH=path, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert "FP8" in table
    assert "a copy" in table


def test_all_files_of_the_suite_are_imported_and_the_short_ones_of_a_bare_machine_come_first():
    """Those that `make test` does not run too: they would notice a moved name only where there is a GPU."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", SUITE],
        env={**os.environ, "SLIMRL_GPU_TESTS_ON_CPU": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    files = list(dict.fromkeys(re.findall(r"tier_a/(test_\w+\.py)::", done.stdout)))
    page = (ROOT / "docs" / "internals.md").read_text().partition("## Tier A")[2].partition("## Tier B")[0]
    assert files == re.findall(r"^\| `(test_\w+\.py)`", page, re.MULTILINE)
    assert set(files) == {file.name for file in (SUITE / "tier_a").glob("test_*.py")}
    assert files[-1] == "test_families_on_gpu.py"


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_what_the_cuda_image_is_to_prove_runs_on_a_cpu():
    run_suite(*(SUITE / "tier_b").glob("test_*.py"), NEEDS_SGLANG, timeout_s=1400)
