"""The packages of a GPU machine, resolved without one: needs PyPI."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "requirements"

pytestmark = [pytest.mark.integration, pytest.mark.full]


def pins(text: str) -> dict[str, str]:
    """Versions by the package's name as PyPI spells it."""
    found = re.findall(r"^([\w.-]+)(?:\[[\w,-]+\])?==(\S+)", text, re.M)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


def test_one_set_of_versions_satisfies_all_packages_and_the_lock_of_a_gpu_machine_is_it(tmp_path):
    """Transformer Engine's part for torch is built from source, with the installed torch; its metadata needs no GPU."""
    lock = tmp_path / "lock-gpu.txt"
    shutil.copy(REQUIREMENTS / "lock-gpu.txt", lock)  # uv keeps its versions as long as they satisfy everything
    command = [
        "uv", "pip", "compile", "--quiet", "--no-build-isolation", "--python", sys.executable,
        "--constraint", REQUIREMENTS / "lock.txt", "--output-file", lock,
        REQUIREMENTS / "slimrl.txt", REQUIREMENTS / "gpu.txt", REQUIREMENTS / "dev.txt",
    ]  # fmt: skip
    environment = {**os.environ, "NVTE_PYTORCH_SKIP_CUDA_BUILD": "TRUE"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    found = pins(lock.read_text())
    assert found == pins((REQUIREMENTS / "lock-gpu.txt").read_text())
    assert {"sglang-kernel", "flashinfer-python", "transformer-engine-cu13", "transformer-engine-torch"} <= found.keys()
