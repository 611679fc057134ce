"""For all tests but those of gpu/: one thread for each process, and folders several files at a time."""

import gc
import os
from pathlib import Path

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and for the processes that tests start


collect_ignore = ["gpu"]  # a suite with settings of its own: `make test-gpu`


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two processes for a folder; none for single files and tests, which would wait for the imports of another one."""
    return 2 if any(Path(argument).is_dir() for argument in config.args) else 0


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported stays, and looking through it at each collection took a tenth of the time
