"""The processes of a run, as the run's own /proc shows them: all of them, whoever their parent is, and no others."""

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

_GONE = (FileNotFoundError, ProcessLookupError)
"""What the files of a process that has ended raise."""
_OF_PROGRAMS: Any = {"errors": "replace", "newline": "\n"}
"""How to open files that hold a process's name, which its program chooses: of any bytes, some that would end a line."""
_FLAGS, _EXITING = 6, 0x4
"""Index of a task's flags in proc/PID/stat, counted behind its name, and the flag of a task that has begun to end
(PF_EXITING)."""
_ENDED = "ZX"
"""States of a process or thread that has ended."""
_LOWEST_PRIORITY = 19
_KCMP, _KCMP_VM = 312, 1
_libc = ctypes.CDLL(None)


@dataclass(frozen=True, kw_only=True)
class Process:
    path: str
    """Path within the run's /proc, of a thread that has not ended."""
    state: str
    """That thread's state, as in proc/PID/stat."""
    faults: int
    cpu_ticks: int
    priority: int


Key = tuple[str, str]
"""Pid within the run, and when the process began: another process may get the number."""


class RunProcesses:
    """The processes of one run. `close` it when the run has ended.

    Args:
        pid: of its first process, as seen from here.
        beside: the session in whose files it works, whose /proc it sees until it has mounted its own.
    """

    def __init__(self, pid: int, beside: "RunProcesses | None" = None) -> None:
        self._pid, self._beside = pid, beside
        self._files: list[int] = []

    def open(self) -> bool:
        """The run's /proc, /tmp and table of sockets, by any thread of its first process; False before it has them."""
        if self._files:
            return True
        for thread in _entries(f"/proc/{self._pid}/task"):
            root = f"/proc/{self._pid}/task/{thread}"
            with _while_it_lives(root):
                self._files.append(os.open(f"{root}/root/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
                theirs = None if self._beside is None else os.fstat(self._beside._files[0]).st_dev
                if os.fstat(self._files[0]).st_dev not in (os.stat("/proc").st_dev, theirs):
                    self._beside = None
                    self._files.append(os.open(f"{root}/root/tmp", os.O_PATH | os.O_CLOEXEC))
                    self._files.append(os.open(f"{root}/net/sockstat", os.O_RDONLY | os.O_CLOEXEC))
                    return True
            self.close()
        return False

    def mounts(self) -> int:
        """A descriptor of the run's mount namespace. Raises OSError if it has ended."""
        return os.open(f"/proc/{self._pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        while self._files:
            os.close(self._files.pop())

    def found(self) -> dict[Key, Process]:
        found = {}
        for name in self._names():
            fields = self._stat(name)
            if not fields:
                continue
            path, state = name, fields[0]
            if state in _ENDED and int(fields[17]) > 1:
                # Its first thread has ended, and shows nothing any more of what the others hold.
                for thread in self.entries(f"{name}/task"):
                    of_thread = self._stat(f"{name}/task/{thread}")
                    if of_thread and of_thread[0] not in _ENDED:
                        path, state = f"{name}/task/{thread}", of_thread[0]
                        break
            found[name, fields[19]] = Process(
                path=path,
                state=state,
                faults=int(fields[7]) + int(fields[9]),
                cpu_ticks=int(fields[11]) + int(fields[12]),
                priority=int(fields[16]),
            )
        return found

    def num_private_pages(self, process: Process) -> int:
        """Resident pages of no file, also those that other processes have, too."""
        fields = self.read(f"{process.path}/statm").split()
        return int(fields[1]) - int(fields[2]) if fields else 0

    def tmpfs(self) -> tuple[int, int]:
        """Bytes and files in the run's /tmp and /dev/shm."""
        tmp = os.fstatvfs(self._files[1])
        return tmp.f_frsize * (tmp.f_blocks - tmp.f_bfree), tmp.f_files - tmp.f_ffree

    def num_sockets(self) -> int:
        """Sockets of its network namespace, also those that no process has open any more."""
        return int(os.pread(self._files[2], 4096, 0).split(maxsplit=3)[2])

    def kill(self) -> None:
        """All processes at once: if only the first were killed, the others would end once it has a core to end on."""
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        if self._files:
            for name in self._names():
                self.signal(name, signal.SIGKILL)

    def signal_first(self, number: int) -> None:
        """Send a signal to the run's first process, which gets SIGSTOP, SIGCONT and SIGKILL from here alone."""
        with suppress(ProcessLookupError):
            os.kill(self._pid, number)

    def single_and_stopped(self) -> bool:
        return [one.state for one in self.found().values()] == ["T"]

    def signal(self, name: str, number: int) -> None:
        with suppress(*_GONE):
            file = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._files[0])
            try:
                signal.pidfd_send_signal(file, number)
            finally:
                os.close(file)

    def yield_to_others(self, processes: dict[Key, Process]) -> None:
        """A run with more processes than there are cores takes what others leave of these, the warm interpreter above
        all: or it would look too late."""
        lowest = all(one.priority == _LOWEST_PRIORITY for one in processes.values())
        if lowest or len(processes) <= (os.cpu_count() or 1):
            return
        for pid in self._pids_here().values():
            for thread in _entries(f"/proc/{pid}/task"):
                with suppress(ProcessLookupError):
                    os.setpriority(os.PRIO_PROCESS, int(thread), _LOWEST_PRIORITY)

    def without_sharers(self, places: dict[Key, str]) -> list[Key]:
        """Processes without those that share the memory of another one in the list, as after vfork.

        Args:
            places: where a process's memory begins and ends: that of sharers is the same, and that of others may be.
        """
        if len({*places.values()}) == len(places):
            return list(places)
        here = self._pids_here()
        kept: list[Key] = []
        for key, place in places.items():
            alike = [here.get(other[0]) for other in kept if places[other] == place]
            if not any(share_memory(here.get(key[0]), other) for other in alike):
                kept.append(key)
        return kept

    def entries(self, path: str) -> list[str]:
        """Names in a folder; none if the process has ended."""
        with _while_it_lives(os.path.dirname(path), self._files[0]):
            file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._files[0])
            try:
                return os.listdir(file)
            finally:
                os.close(file)
        return []

    def read(self, path: str) -> str:
        """Text of a file; "" if the process has ended."""
        with _while_it_lives(os.path.dirname(path), self._files[0]):
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._files[0])
            with open(file, **_OF_PROGRAMS) as text:
                return text.read()
        return ""

    def count_lines(self, path: str, most: int) -> int:
        """Number of lines of a file; any number above `most` if it has more lines than that; 0 if the process has
        ended."""
        number = 0
        with _while_it_lives(os.path.dirname(path), self._files[0]):
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._files[0])
            try:
                while number <= most and (piece := os.read(file, 1 << 16)):
                    number += piece.count(b"\n")
            finally:
                os.close(file)
        return number

    def _names(self) -> list[str]:
        return [name for name in os.listdir(self._files[0]) if name.isdigit()]

    def _stat(self, path: str) -> list[str]:
        return _stat(path, self._files[0])

    def _pids_here(self) -> dict[str, int]:
        """Pid within the run -> pid here."""
        pids = {}
        for pid in [self._pid, *_descendants(self._pid)]:
            with suppress(*_GONE), open(f"/proc/{pid}/status", **_OF_PROGRAMS) as status:
                fields: list[str] = next((line.split() for line in status if line.startswith("NSpid:")), [])
                pids[fields[-1]] = pid
        return pids


def share_memory(pid: int | None, other: int | None) -> bool:
    """False too if one has ended, or the kernel has no kcmp.

    Asked of threads that live: those that have ended have no memory, which would be the same.
    """
    threads = _living_thread(pid), _living_thread(other)
    return None not in threads and _libc.syscall(_KCMP, *threads, _KCMP_VM, 0, 0) == 0


def _living_thread(pid: int | None) -> int | None:
    for thread in _entries(f"/proc/{pid}/task"):
        fields = _stat(f"/proc/{pid}/task/{thread}", None)
        if fields and fields[0] not in _ENDED:
            return int(thread)
    return None


def _descendants(pid: int) -> list[int]:
    """Pids of children, their children and so on; orphans are children of the run's process 1."""
    found = []
    for thread in _entries(f"/proc/{pid}/task"):
        with suppress(*_GONE), open(f"/proc/{pid}/task/{thread}/children") as children:
            for child in children.read().split():
                found += [int(child), *_descendants(int(child))]
    return found


@contextmanager
def _while_it_lives(path: str, folder: int | None = None) -> Iterator[None]:
    """Leave out what the files of a process or thread raise once it has ended.

    Who has begun to end has no memory any more, and is then refused to everybody if it was not to be traced before.

    Args:
        path: its folder in /proc, below `folder`.
    """
    try:
        yield
    except _GONE:
        pass
    except PermissionError:
        fields = _stat(path, folder)
        if fields and not int(fields[_FLAGS]) & _EXITING:
            raise


def _stat(path: str, folder: int | None) -> list[str]:
    """What proc/PID/stat, which everybody may read, has behind the name; nothing if the process has ended."""
    with suppress(*_GONE):
        file = os.open(f"{path}/stat", os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
        with open(file, **_OF_PROGRAMS) as text:
            return text.read().rpartition(")")[2].split()
    return []


def _entries(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except _GONE:
        return []
