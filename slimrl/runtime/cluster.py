"""The Ray cluster of a run, and calls to its actors that have a deadline and one clear error.

A laptop gets a private local cluster in its own temporary folder; on a real cluster RAY_ADDRESS names the head node.
"""

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from slimrl.runtime.errors import StageError

OBJECT_STORE_BYTES = 1024**3
"""Shared memory that a private cluster may use for what passes between processes."""

POLL_S = 0.2
"""How often a waiting driver looks at its progress display."""

_TEMP_PREFIX = "slimrl-ray-"


@contextmanager
def ray_cluster() -> Iterator[None]:
    """Connects to RAY_ADDRESS, or starts a cluster on this machine and ends it on the way out."""
    address = os.environ.get("RAY_ADDRESS")
    if address:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        try:
            yield
        finally:
            ray.shutdown()
        return
    _remove_stale_temp_dirs()
    # A unix socket's path is limited to 107 bytes, so this lies in the system's temporary folder, not in the run's.
    temp_dir = Path(tempfile.gettempdir()) / f"{_TEMP_PREFIX}{os.getpid()}"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
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
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(temp_dir, ignore_errors=True)


def _remove_stale_temp_dirs() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_TEMP_PREFIX}*"):
        pid = folder.name.removeprefix(_TEMP_PREFIX)
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def call_all(
    actors: Mapping[str, Any],
    method: str,
    arguments: Mapping[str, tuple[Any, ...]] | None = None,
    *,
    timeout_s: float,
    while_waiting: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Calls `method` on every actor at once and returns the results by actor name.

    Args:
        actors: handles by the name that errors and log files use.
        arguments: positional arguments by actor name; None calls without any.
        while_waiting: called every POLL_S seconds, for progress displays.

    Raises:
        StageError: one actor raised, died, or did not answer in time; the first one known, without waiting for others.
    """
    refs = {
        name: getattr(actor, method).remote(*(arguments[name] if arguments else ())) for name, actor in actors.items()
    }
    return wait_all(refs, method, timeout_s=timeout_s, while_waiting=while_waiting)


def wait_all(
    refs: Mapping[str, Any], method: str, *, timeout_s: float, while_waiting: Callable[[], None] | None = None
) -> dict[str, Any]:
    """Results of calls of `method` that are under way, by actor name; otherwise as `call_all`."""
    results: dict[str, Any] = {}
    deadline = time.monotonic() + timeout_s
    names = {ref: name for name, ref in refs.items()}
    while len(results) < len(refs):
        waiting = [ref for ref, name in names.items() if name not in results]
        done, _ = ray.wait(waiting, num_returns=len(waiting), timeout=POLL_S)
        for ref in done:
            results[names[ref]] = _result(ref, names[ref], method)
        if while_waiting is not None:
            while_waiting()
        if len(results) < len(refs) and time.monotonic() > deadline:
            late = ", ".join(name for name in refs if name not in results)
            raise StageError(f"{late}: {method} did not finish within {timeout_s:.0f} s")
    return {name: results[name] for name in refs}


def _result(ref: Any, name: str, method: str) -> Any:
    try:
        return ray.get(ref)
    except RayTaskError as error:
        cause = error.cause
        raise StageError(f"{name}: {method}: {type(cause).__name__}: {cause}", str(error)) from None
    except RayActorError as error:
        raise StageError(f"{name}: its process died during {method}", str(error)) from None
    except RayError as error:
        raise StageError(f"{name}: {method}: {type(error).__name__}", str(error)) from None
