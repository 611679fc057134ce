"""Logs: one file per process in `<run>/logs/`, Python's records and raw output alike."""

import faulthandler
import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class _Hiding(logging.Formatter):
    def __init__(self, hide: Callable[[str], str]) -> None:
        super().__init__(FORMAT)
        self._hide = hide

    def format(self, record: logging.LogRecord) -> str:
        return self._hide(super().format(record))


def log_to_file(path: Path, level: int = logging.INFO, hide: Callable[[str], str] = lambda text: text) -> None:
    """Send this process's log records to the file; whatever handlers the root logger had are replaced.

    Args:
        hide: takes out of a record, traceback included, what is not to be written down.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(_Hiding(hide))
    logging.basicConfig(handlers=[handler], level=level, force=True)
    logging.captureWarnings(True)
    # One line per HTTP request, dozens a second while something starts.
    logging.getLogger("httpx").setLevel(logging.WARNING)


def capture_output(path: Path, level: int = logging.INFO) -> None:
    """Send everything that this process writes, C++ and crashes included, to the file; for worker processes.

    Descriptors 1 and 2 are replaced, so the output of its later children goes there too.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    log_to_file(path, level)
    faulthandler.enable(file=2)


def quiet_megatron() -> None:
    """megatron-core's import warns of libraries that only training on GPUs needs; for commands that do not train."""
    warnings.filterwarnings("ignore", module=r"megatron\.")
