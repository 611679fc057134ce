"""For all tests: one thread for each process, folders several files at a time, `gpu` skipped without such a device."""

import gc
import os
from pathlib import Path

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and for the processes that tests start


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two processes for a folder; none for single files and tests, which would wait for the imports of another one."""
    return 2 if any(Path(argument).is_dir() for argument in config.args) else 0


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported stays, and looking through it at each collection took a tenth of the time


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch  # not above, since the process that only hands out the files reads this one too

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
