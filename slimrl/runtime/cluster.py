"""The Ray cluster of a run.

Without an address a run gets a private cluster on this machine, in a temporary folder of its own. With one it joins
the cluster whose head node is there, and leaves it on the way out: its actors end, the cluster's nodes do not.
Processes of a private cluster have that folder for their temporary files too, since most of them are ended before they
could remove them: it goes as a whole. A guard (guard.py) ends them where the driver is killed and cannot.
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
from slimrl.runtime.guard import guarded

OBJECT_STORE_BYTES = 1024**3
"""Shared memory that a private cluster may use for what passes between processes."""

_TEMP_PREFIX = "slimrl-ray-"
_COMPILED_PREFIX = "slimrl-compiled-"


@contextmanager
def ray_cluster(address: str | None, *, num_slots: int) -> Iterator[None]:
    """Joins the cluster at `address`, or starts one on this machine and ends it on the way out.

    Args:
        num_slots: what a cluster that is started here has of cores, whatever this machine has: trainer and engines
            take turns, and nobody starts more threads than its recipe says.

    Raises:
        StageError: Ray did not start, or does not answer.
    """
    if address is not None:
        try:
            _join(address)
            yield
        finally:
            ray.shutdown()
        return
    _remove_stale_temp_dirs()
    # A unix socket's path is limited to 107 bytes, so this lies in the system's temporary folder, not in the run's.
    temp_dir = Path(tempfile.gettempdir()) / f"{_TEMP_PREFIX}{os.getpid()}"
    temporary_files = temp_dir / "tmp"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with guarded(temp_dir, temporary_files):
        try:
            with _temporary_files_in(temporary_files):
                _start_local(temp_dir, num_slots)
            yield
        finally:
            ray.shutdown()
            shutil.rmtree(temp_dir, ignore_errors=True)


@contextmanager
def _temporary_files_in(folder: Path) -> Iterator[None]:
    """Processes that are started inside, and theirs, use this folder; this process keeps its own.

    What torch compiles goes where the next run finds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    compiled = Path(tempfile.gettempdir()) / f"{_COMPILED_PREFIX}{os.getuid()}"
    before = {name: os.environ.get(name) for name in ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR")}
    os.environ["TMPDIR"] = str(folder)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compiled))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _join(address: str) -> None:
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (RuntimeError, ConnectionError, ValueError) as error:
        raise StageError(f"no Ray cluster answers at {address}: {error}") from error


def _start_local(temp_dir: Path, num_slots: int) -> None:
    try:
        ray.init(
            address="local",
            num_cpus=num_slots,
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
