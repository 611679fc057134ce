"""What a run holds of the host's memory, which no resource limit bounds for all of its processes together.

1. Each look is cheap, and gives a bound from above: the private memory of the last exact measurement; a page for each
   page fault of these processes since, for the kernel gives memory to a program in no other way, and one page at a time
   (confine.py); all that is resident of processes that have begun since, though they share what they inherit; what is
   in the run's tmpfs; and the most that its sockets, open files, mappings and processes can hold.
2. Only if the bound is above the limit is the private memory measured, page by page, which takes about a millisecond
   for each process. If there are several, they are stopped meanwhile, or they would take on.
3. The next look comes before the run could have taken what is left: at most SAMPLE_S later.

Memory that is seen in none of these ways cannot be had: seccomp.py refuses the calls.
"""

import os
import signal
import socket

from slimrl.agent.sandbox.inside.processes import Key, Process, RunProcesses

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SAMPLE_S, SHORTEST_SAMPLE_S = 0.1, 0.002
BYTES_PER_S = 4 << 30
"""More than one core fills, page by page. It is fastest where a program asks the kernel for all pages in one call: 2.9
GiB/s on a core of 2024."""
MAX_MAPPINGS = 16_384
"""Of a process: each is a kernel object, and forks copy them."""
MAX_LOCKS = 4096
"""Of files, which the kernel does not limit."""
MAPPING_BYTES = 256
PROCESS_BYTES = 256 * 1024
"""Kernel stack, page tables and the like."""
FILE_BYTES = 64 * 1024
"""Of an open file at most: a full pipe, or an epoll that waits for all other files."""
INODE_BYTES = 1536
"""Of the tmpfs, with its name and attributes."""
_OPTION_BYTES = 128 * 1024
_TICKS = 2
"""Of CPU time, after which mappings are counted anew."""


class RunMemory:
    """The memory of one run.

    Args:
        given_bytes: what the run was given in memory of the host.
        most_processes: that it may have.
    """

    def __init__(self, processes: RunProcesses, limit_bytes: int, given_bytes: int, most_processes: int) -> None:
        self._processes, self._limit_bytes, self._given_bytes = processes, limit_bytes, given_bytes
        self._bytes_per_s = BYTES_PER_S * min(most_processes, os.cpu_count() or 1)
        self._private_bytes = 0
        self._faults: dict[Key, int] = {}
        self._mappings: dict[Key, tuple[int, int]] = {}
        """Their number, and the process's CPU time when they were counted."""
        self.next_look_s = self._until(0)

    def exceeds(self, found: dict[Key, Process]) -> bool:
        """Whether the run holds more than its limit. Sets `next_look_s`."""
        held = self._given_bytes + self._held_bytes(found)
        bound = (
            held
            + self._private_bytes
            + PAGE_BYTES
            * sum(
                one.faults - self._faults[key] if key in self._faults else self._processes.num_private_pages(one)
                for key, one in found.items()
            )
        )
        if bound > self._limit_bytes:
            bound = held + self._measure(found)
        self.next_look_s = self._until(bound)
        return bound > self._limit_bytes

    def _until(self, bound: int) -> float:
        return min(SAMPLE_S, max(SHORTEST_SAMPLE_S, (self._limit_bytes - bound) / self._bytes_per_s))

    def _held_bytes(self, found: dict[Key, Process]) -> int:
        """The most that the run holds besides the private memory of its processes."""
        tmpfs_bytes, num_inodes = self._processes.tmpfs()
        num_files = sum(len(self._processes.entries(f"{one.path}/fd")) for one in found.values())
        held = tmpfs_bytes + INODE_BYTES * num_inodes + FILE_BYTES * num_files + PROCESS_BYTES * len(found)
        held += self._processes.num_sockets() * _socket_bytes() + MAPPING_BYTES * self._num_mappings(found)
        too_many_locks = self._processes.count_lines("locks", MAX_LOCKS) > MAX_LOCKS
        return held + (self._limit_bytes if too_many_locks else 0)

    def _num_mappings(self, found: dict[Key, Process]) -> int:
        """Counted where a process has used CPU time since; a process that has just begun may have those of another."""
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

    def _measure(self, found: dict[Key, Process]) -> int:
        """Bytes of private memory and page tables. What processes share, of forks and of threads alike, counts once."""
        stopped: dict[str, None] = {}
        if len(found) > 1:
            while new := [key[0] for key, one in found.items() if key[0] not in stopped and one.state not in "TtZX"]:
                for name in new:
                    self._processes.signal(name, signal.SIGSTOP)
                    stopped[name] = None
                found = self._processes.found()  # with those that they have forked meanwhile
        self._faults = {key: one.faults for key, one in found.items()}
        shown = {key: self._processes.read(f"{one.path}/smaps_rollup") for key, one in found.items()}
        self._private_bytes = sum(
            _sum_bytes(shown[key], ("Pss_Anon:", "SwapPss:"))
            + _sum_bytes(self._processes.read(f"{found[key].path}/status"), ("VmPTE:",))
            for key in self._processes.without_sharers({key: text.partition(" ")[0] for key, text in shown.items()})
        )
        for name in stopped:
            self._processes.signal(name, signal.SIGCONT)
        return self._private_bytes


def _socket_bytes() -> int:
    """The most that a socket holds: it may send until its buffer is full, and then one message as large; and options.

    What was sent counts for its sender, also after that was closed.
    """
    with socket.socket(socket.AF_UNIX) as one:
        return 2 * one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) + _OPTION_BYTES


def _sum_bytes(text: str, names: tuple[str, ...]) -> int:
    return sum(1024 * int(line.split()[1]) for line in text.split("\n") if line.startswith(names))
