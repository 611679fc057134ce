"""The Ray cluster of a run.

Without an address a run starts a private cluster on this machine, in a temporary folder of its own, which nobody else
can reach (private_access.py). With an address it joins the cluster whose head node is there, and leaves it at the end:
its actors end, the cluster's nodes stay.
Processes of a private cluster put their temporary files into that folder too, since most are killed before they could
remove them; the folder is removed as a whole. If the driver is killed, a guard (guard.py) ends these processes.
"""

import logging
import os
import re
import shutil
import signal
import stat
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import ray

from slimrl.base.errors import StageError
from slimrl.base.processes import await_end, send_all
from slimrl.runtime.cluster.guard import end_members, guarded
from slimrl.runtime.cluster.head_watch import watching_head
from slimrl.runtime.cluster.private_access import private_access

log = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 1024**3
"""Shared memory of a private cluster's object store."""

START_ATTEMPTS = 3
RAY_GIVES_UP_S = 30.0
"""How long Ray itself, which has no option for it, waits for its node."""

RAYLET_ENDS_S = 30.0
"""Longest time from the start of the shutdown, which tells the raylet to end, until it has ended; Ray kills it a second
later."""

_TEMP_PREFIX = "slimrl-run-"
_TEMP_NAME = re.compile(rf"{_TEMP_PREFIX}(\d+)-\w+")
_COMPILED_PREFIX = "slimrl-compiled-"
_LONGEST_SOCKET = "ray/session_2026-01-31_23-59-59_999999_{pid}/sockets/plasma_store"
"""Longest path of a socket that Ray makes in a run's folder, relative to it"""
_MAX_SOCKET_BYTES = 107
"""Longest path of a Unix socket that the kernel takes."""


@contextmanager
def ray_cluster(address: str | None, *, num_slots: int) -> Iterator[None]:
    """Join the cluster at `address`, or start one on this machine and end it afterwards.

    Args:
        num_slots: number of CPUs that a private cluster reports, whatever this machine has: trainer and engines take
            turns, and no process starts more threads than its recipe says.

    Raises:
        StageError: Ray did not start, or does not answer.
    """
    if address is not None:
        try:
            _join(address)
            with watching_head(ray.get_runtime_context().gcs_address):
                yield
        finally:
            ray.shutdown()
        return
    _remove_stale_temp_dirs()
    # Ray lets everybody write to its own folder, so that lies in one that only this user can enter.
    folder = Path(tempfile.mkdtemp(prefix=f"{_TEMP_PREFIX}{os.getpid()}-", dir=_folder_of_runs()))
    temporary_files = folder / "tmp"
    temporary_files.mkdir()
    try:
        with guarded(folder, temporary_files), private_access(folder):
            try:
                with _variables(_inherited_by_processes(folder, temporary_files)):
                    _start_local(folder, num_slots)
                with watching_head(ray.get_runtime_context().gcs_address):
                    yield
            finally:
                _shut_down()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _folder_of_runs() -> str:
    """The system's temporary folder, or /tmp where the paths of Ray's sockets in it would be too long."""
    folder = tempfile.gettempdir()
    longest = f"{folder}/{_TEMP_PREFIX}{os.getpid()}-12345678/{_LONGEST_SOCKET.format(pid=os.getpid())}"
    return folder if len(os.fsencode(longest)) <= _MAX_SOCKET_BYTES else "/tmp"


def _inherited_by_processes(folder: Path, temporary_files: Path) -> dict[str, str]:
    """Variables of the cluster's processes and not of this one.

    - Temporary files go to the run's folder; torch's compiled kernels to one that later runs reuse.
    - Gloo and NCCL listen on the loopback interface.
    - Workers have this process's priority. Ray would give them the nice value 15, with which they starve beside other
      work of the machine while their driver waits.
    """
    variables = {"TMPDIR": str(temporary_files), "RAY_USAGE_STATS_ENABLED": "0"}
    if "RAY_worker_niceness" not in os.environ:
        variables["RAY_worker_niceness"] = "0"
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        variables["TORCHINDUCTOR_CACHE_DIR"] = str(_compiled_folder(folder))
    interfaces = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return variables | {name: "lo" for name in interfaces if name not in os.environ}


def _compiled_folder(folder: Path) -> Path:
    """This user's, from which torch loads code; one of the run alone where its name belongs to somebody else."""
    path = Path(tempfile.gettempdir()) / f"{_COMPILED_PREFIX}{os.getuid()}"
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
        return path
    log.warning("%s can be written by others and is not used", path)
    return folder / "compiled"


@contextmanager
def _variables(given: Mapping[str, str]) -> Iterator[None]:
    """Variables of this process's environment inside the block."""
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
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


def _start_local(folder: Path, num_slots: int) -> None:
    """Start a cluster, again if Ray was only too slow: it gives up on a machine that is busy with something else."""
    for attempt in range(1, START_ATTEMPTS + 1):
        began = time.monotonic()
        try:
            ray.init(
                address="local",
                num_cpus=num_slots,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=str(folder / "ray"),
            )
            return
        except Exception as error:  # Ray raises a plain Exception when its own processes are late.
            # Ray ends only processes of a cluster that has started.
            end_members(folder, Path(os.environ["TMPDIR"]), grace_s=0.0)
            if time.monotonic() - began < RAY_GIVES_UP_S or attempt == START_ATTEMPTS:
                raise StageError(f"Ray did not start: {error}") from error
            log.warning("Ray gave up on its own start, attempt %d of %d: %s", attempt, START_ATTEMPTS, error)


def _shut_down() -> None:
    """End the private cluster.

    Ray ends its processes one after another, the raylet and so all workers first, and gives each other one a second,
    which they use up and are then killed. They have nothing to save, so they are killed as soon as the raylet is gone.
    """
    folder = Path(ray.__file__).parent
    commands = {process: _command(process) for process in psutil.Process().children()}
    started = [
        process for process, words in commands.items() if any(Path(word).is_relative_to(folder) for word in words)
    ]
    raylets = [process for process in started if Path(commands[process][0]).name == "raylet"]

    def kill_others() -> None:
        if not await_end(raylets, RAYLET_ENDS_S):  # Otherwise Ray goes on in its own order.
            send_all(set(started).difference(raylets), signal.SIGKILL)

    beside = threading.Thread(target=kill_others)
    beside.start()
    ray.shutdown()
    beside.join()


def _command(process: psutil.Process) -> list[str]:
    """Command line of a process; empty if it has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _remove_stale_temp_dirs() -> None:
    """Remove this user's folders of runs that have ended without doing so."""
    for folder in Path(_folder_of_runs()).glob(f"{_TEMP_PREFIX}*"):
        match = _TEMP_NAME.fullmatch(folder.name)
        with suppress(FileNotFoundError):  # Another run that starts just now may remove it first.
            if match and not psutil.pid_exists(int(match[1])) and folder.lstat().st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)
