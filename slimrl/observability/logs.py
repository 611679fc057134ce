"""Logs: one file per process in `<run>/logs/`, for Python's log records and raw output."""

import faulthandler
import logging
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from slimrl.base.atomic import disk_reason
from slimrl.base.visible import visible

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class _Hiding(logging.Formatter):
    """Formatter that hides secrets, and what would steer the terminal of a reader"""

    def __init__(self, hide: Callable[[str], str]) -> None:
        super().__init__(FORMAT)
        self._hide = hide

    def format(self, record: logging.LogRecord) -> str:
        return visible(self._hide(super().format(record)))


class _LogFile(logging.FileHandler):
    """The handler that `log_to_file` installs, known by its class; of a disk that is full it says so once."""

    _said = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._said:
            self._said = True
            # The output of a worker may be on the same disk.
            with suppress(OSError):
                print(f"{self.baseFilename}: cannot be written: {disk_reason(error)}", file=sys.stderr)


def log_to_file(path: Path, hide: Callable[[str], str] = lambda text: text) -> None:
    """Send this process's log records to the file, replacing the root logger's handlers.

    Args:
        hide: removes secrets from a record, traceback included.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = _LogFile(path)
    handler.setFormatter(_Hiding(hide))
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)
    logging.captureWarnings(True)
    # httpx logs each request: dozens a second while servers start.
    logging.getLogger("httpx").setLevel(logging.WARNING)


def log_folder() -> Path | None:
    """The folder of the file that `log_to_file` has opened; None if it has not."""
    files = [handler for handler in logging.getLogger().handlers if isinstance(handler, _LogFile)]
    return Path(files[0].baseFilename).parent if files else None


def capture_output(path: Path) -> None:
    """Send all output of this worker process to the file, that of C++ and of crashes included.

    It replaces descriptors 1 and 2, so the output of later child processes goes there too.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    log_to_file(path)
    faulthandler.enable(file=2)


def quiet_megatron() -> None:
    """Hide warnings of megatron-core and torch about training, in commands that do not train."""
    for module in ("megatron", "torch.distributed.checkpoint"):
        warnings.filterwarnings("ignore", module=rf"{module}\.")
    for name in ("megatron", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
