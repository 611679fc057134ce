"""Private memory of all processes of a run, which no resource limit bounds together."""

import os

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def exceeds(pid: int, limit_bytes: int) -> bool:
    """Whether a process and its descendants hold more private memory than the limit.

    A fork shares pages with the warm interpreter. Counting them for each process is quick, so only if that sum is above
    the limit each page is divided by the number of processes that have it (Pss), which takes about a millisecond.
    """
    pids = [pid, *descendants(pid)]
    return sum(map(_resident_bytes, pids)) > limit_bytes and sum(map(_proportional_bytes, pids)) > limit_bytes


def descendants(pid: int) -> list[int]:
    """Pids of children, their children and so on; orphans are children of the run's process 1."""
    found = []
    for thread in _entries(f"/proc/{pid}/task"):
        for child in _read(f"/proc/{pid}/task/{thread}/children").split():
            found += [int(child), *descendants(int(child))]
    return found


def _resident_bytes(pid: int) -> int:
    fields = _read(f"/proc/{pid}/statm").split()
    return (int(fields[1]) - int(fields[2])) * PAGE_BYTES if fields else 0


def _proportional_bytes(pid: int) -> int:
    for line in _read(f"/proc/{pid}/smaps_rollup").splitlines():
        name, value, *_ = line.split()
        if name == "Pss_Anon:":
            return 1024 * int(value)
    return 0


def _entries(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []  # it has ended


def _read(file: str) -> str:
    try:
        with open(file) as text:
            return text.read()
    except OSError:
        return ""  # it has ended
