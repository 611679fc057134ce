"""What a run holds of the host's memory, which no resource limit bounds for all of its processes together.

1. Each look is cheap, and gives a bound from above: the private memory of the last exact measurement; a page for each
   page fault of these processes since, for the kernel gives memory to a program in no other way, and one page at a time
   (confine.py); all that is resident of processes that have begun since, though they share what they inherit; what is
   in the run's tmpfs; the most that its sockets, open files, mappings and processes can hold; and what the run could
   have taken while it was looked at, which takes tens of milliseconds where many processes want the cores.
2. All of it is measured, the private memory page by page, if the bound is above the limit, or if the look comes so late
   that the run could have taken what was left. That takes about a millisecond for each process. If there are several,
   they are stopped first, or they would take on.
3. The next look comes when the run could have taken half of what is left: at most SAMPLE_S later.

Memory that is seen in none of these ways cannot be had: seccomp.py refuses the calls.
"""

import os
import signal
import socket
import time

from slimrl.agent.sandbox.inside.processes import Key, Process, RunProcesses

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SAMPLE_S, SHORTEST_SAMPLE_S = 0.1, 0.002
BYTES_PER_S = 4 << 30
"""Bytes per second that no core exceeds when it fills memory, page by page. It is fastest where a program asks the
kernel for all pages in one call: 2.9 GiB/s on a core of 2024."""
MAX_MAPPINGS = 16_384
"""Most memory mappings of a process: each is a kernel object, and forks copy them."""
MAX_LOCKS = 4096
"""Most locks on files, which the kernel does not limit."""
STOP_S = 0.002
"""Seconds that processes get to stop in, before they are measured again"""
MAPPING_BYTES = 256
PROCESS_BYTES = 256 * 1024
"""Memory of a process besides its pages: kernel stack, page tables and the like."""
FILE_BYTES = 64 * 1024
"""Most memory of an open file: a full pipe, or an epoll that waits for all other files."""
INODE_BYTES = 1536
"""Memory of a file's inode on the tmpfs, with its name and attributes."""
_OPTION_BYTES = 128 * 1024
_TICKS = 2
"""Ticks of CPU time after which a process's mappings are counted anew."""


class RunMemory:
    """The memory that one run holds, as an upper bound.

    Args:
        given_bytes: what the run was given in memory of the host.
        most_processes: that it may have.
    """

    def __init__(self, processes: RunProcesses, limit_bytes: int, given_bytes: int, most_processes: int) -> None:
        self._processes, self._limit_bytes, self._given_bytes = processes, limit_bytes, given_bytes
        self._bytes_per_s = BYTES_PER_S * min(most_processes, os.cpu_count() or 1)
        self._bound, self._bound_at = 0, time.monotonic()
        self._private_bytes = 0
        self._faults: dict[Key, int] = {}
        self._mappings: dict[Key, tuple[int, int]] = {}
        """Number of a process's mappings, and its CPU time in ticks when they were counted."""

    @property
    def next_look_s(self) -> float:
        """Seconds from now until the run's memory must be measured again."""
        half_s = (self._limit_bytes - self._bound) / (2 * self._bytes_per_s)
        return min(SAMPLE_S, max(SHORTEST_SAMPLE_S, half_s))

    def exceeds(self) -> bool:
        """Whether the run holds more than its limit. Sets `next_look_s`."""
        now = time.monotonic()
        bound = self._bound + self._taken_since(self._bound_at)
        if bound <= self._limit_bytes:
            found = self._processes.found()
            self._processes.yield_to_others(found)
            bound = self._bound_from_above(found) + self._taken_since(now)
        if bound > self._limit_bytes:
            bound = self._measure()
        self._bound, self._bound_at = bound, time.monotonic()
        return bound > self._limit_bytes

    def _taken_since(self, when: float) -> int:
        """The most that the run can have taken since then."""
        return int(self._bytes_per_s * (time.monotonic() - when))

    def _bound_from_above(self, found: dict[Key, Process]) -> int:
        return (
            self._held_bytes(found)
            + self._private_bytes
            + PAGE_BYTES
            * sum(
                one.faults - self._faults[key] if key in self._faults else self._processes.num_private_pages(one)
                for key, one in found.items()
            )
        )

    def _held_bytes(self, found: dict[Key, Process]) -> int:
        """The most that the run holds besides the private memory of its processes."""
        tmpfs_bytes, num_inodes = self._processes.tmpfs()
        num_files = sum(len(self._processes.entries(f"{one.path}/fd")) for one in found.values())
        held = self._given_bytes + tmpfs_bytes + INODE_BYTES * num_inodes
        held += FILE_BYTES * num_files + PROCESS_BYTES * len(found)
        held += self._processes.num_sockets() * _socket_bytes() + MAPPING_BYTES * self._num_mappings(found)
        too_many_locks = self._processes.count_lines("locks", MAX_LOCKS) > MAX_LOCKS
        return held + (self._limit_bytes if too_many_locks else 0)

    def _num_mappings(self, found: dict[Key, Process]) -> int:
        """Number of mappings of all processes, counted anew where a process has used CPU time since; one that has just
        begun may have as many as any other."""
        known = {key: self._mappings[key] for key in found if key in self._mappings}
        for key, one in found.items():
            _, ticks = known.get(key, (0, 0))
            if one.cpu_ticks >= ticks + _TICKS:
                known[key] = self._processes.count_lines(f"{one.path}/maps", MAX_MAPPINGS), one.cpu_ticks
                if known[key][0] > MAX_MAPPINGS:
                    return self._limit_bytes
        self._mappings = known
        most = max((number for number, _ in known.values()), default=0)
        return sum(known[key][0] if key in known else most for key in found)

    def _measure(self) -> int:
        """Bytes that the run holds. What processes share, of forks and of threads alike, counts once."""
        found = self._processes.found()
        stopped: dict[str, None] = {}
        if len(found) > 1:
            while new := [key[0] for key, one in found.items() if key[0] not in stopped and one.state not in "TtZX"]:
                for name in new:
                    self._processes.signal(name, signal.SIGSTOP)
                    stopped[name] = None
                found = self._processes.found()  # with those that they have forked meanwhile
            self._processes.yield_to_others(found)
        bound = self._measured(found)
        if bound > self._limit_bytes and stopped:
            # One that had not stopped yet may have left the memory that it had in common with another (vfork, exec)
            # between what was read of it and the question whether they share it.
            time.sleep(STOP_S)
            bound = self._measured(self._processes.found())
        for name in stopped:
            self._processes.signal(name, signal.SIGCONT)
        return bound

    def _measured(self, found: dict[Key, Process]) -> int:
        """Bytes that these processes hold now."""
        self._faults = {key: one.faults for key, one in found.items()}
        shown = {key: self._processes.read(f"{one.path}/smaps_rollup") for key, one in found.items()}
        self._private_bytes = sum(
            _sum_bytes(shown[key], ("Pss_Anon:", "SwapPss:"))
            + _sum_bytes(self._processes.read(f"{found[key].path}/status"), ("VmPTE:",))
            for key in self._processes.without_sharers({key: text.partition(" ")[0] for key, text in shown.items()})
        )
        return self._held_bytes(found) + self._private_bytes


def _socket_bytes() -> int:
    """The most that a socket holds: it may send until its buffer is full, and then one message as large; and options.

    What was sent counts for its sender, also after that was closed.
    """
    with socket.socket(socket.AF_UNIX) as one:
        return 2 * one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) + _OPTION_BYTES


def _sum_bytes(text: str, names: tuple[str, ...]) -> int:
    return sum(1024 * int(line.split()[1]) for line in text.split("\n") if line.startswith(names))
