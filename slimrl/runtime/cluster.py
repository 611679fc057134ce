"""The Ray cluster of a run.

A laptop gets a private local cluster in its own temporary folder; on a real cluster RAY_ADDRESS names the head node.
"""

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import ray

from slimrl.runtime.errors import StageError

OBJECT_STORE_BYTES = 1024**3
"""Shared memory that a private cluster may use for what passes between processes."""

_TEMP_PREFIX = "slimrl-ray-"


@contextmanager
def ray_cluster() -> Iterator[None]:
    """Connects to RAY_ADDRESS, or starts a cluster on this machine and ends it on the way out.

    Raises:
        StageError: Ray did not start.
    """
    address = os.environ.get("RAY_ADDRESS")
    if address:
        try:
            _connect(address)
            yield
        finally:
            ray.shutdown()
        return
    _remove_stale_temp_dirs()
    # A unix socket's path is limited to 107 bytes, so this lies in the system's temporary folder, not in the run's.
    temp_dir = Path(tempfile.gettempdir()) / f"{_TEMP_PREFIX}{os.getpid()}"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        _start_local(temp_dir)
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(temp_dir, ignore_errors=True)


def _connect(address: str) -> None:
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (RuntimeError, ConnectionError, ValueError) as error:
        raise StageError(f"no Ray cluster answers at RAY_ADDRESS={address}: {error}") from error


def _start_local(temp_dir: Path) -> None:
    try:
        ray.init(
            address="local",
            num_cpus=os.cpu_count(),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=str(temp_dir),
        )
    except Exception as error:  # Ray raises this very class when its own processes are late.
        raise StageError(f"Ray did not start: {error}") from error


def _remove_stale_temp_dirs() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_TEMP_PREFIX}*"):
        pid = folder.name.removeprefix(_TEMP_PREFIX)
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)
