"""Virtual environments with packages that contradict slimrl's own, for tests that are `full`."""

import subprocess
import sys
from pathlib import Path

UV = Path(sys.executable).parent / "uv"


def own_venv(folder: Path, *packages: str) -> str:
    """The Python of a new environment with these packages of PyPI."""
    python = str(folder / "bin" / "python")
    subprocess.run([UV, "venv", "-q", "--python", sys.executable, folder], check=True, timeout=60)
    subprocess.run([UV, "pip", "install", "-q", "--python", python, *packages], check=True, timeout=280)
    return python
