"""What several unit tests begin with."""

from pathlib import Path

import pytest
from slimrl_tools.toy import write_toy
from toy_tools import SMALL


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A random Qwen3-MoE, the same each time."""
    write_toy("qwen3_moe", tmp_path / "toy", SMALL, seed=1)
    return tmp_path / "toy"
