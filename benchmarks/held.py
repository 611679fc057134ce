"""What the processes of a run hold at a moment: memory, file descriptors and threads by kind of process, and bytes of
files."""

import os
import re
from collections import defaultdict
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import psutil

KINDS = (
    ("trainer", ("ray::TrainerActor",)),
    ("engine actor", ("ray::EngineActor",)),
    ("engine", ("slimrl.engines.plugin.launch", "sglang::")),
    ("sandbox", ("bwrap", "sandbox")),
    ("environments", ("isolation/bootstrap.py",)),
    ("Ray", ("ray::", "/ray/")),
)
"""Kind of process by what stands in its command line, the first that fits"""
SHARED_MEMORY = Path("/dev/shm")


def kind_of(command: str) -> str:
    return next((kind for kind, texts in KINDS if any(text in command for text in texts)), "other")


def lasting(driver: psutil.Process) -> set[psutil.Process]:
    """The processes that a run has started, without those of a sandbox: they have no shared memory, and so many come
    and go that their numbers would be taken for those of other runs."""
    found = set()
    for process in driver.children(recursive=True):
        with suppress(psutil.Error):  # It has ended meanwhile.
            if kind_of(" ".join(process.cmdline())) not in ("sandbox", "other"):
                found.add(process)
    return found


def held_by(driver: psutil.Process) -> dict[str, float]:
    """Figures of the driver and of all that it has started, by `KIND: WHAT`. Memory is what a process would give back
    if it ended (USS, smaps_rollup of proc(5)), in MB."""
    found: dict[str, float] = defaultdict(float)
    for process in (driver, *driver.children(recursive=True)):
        with suppress(psutil.Error):  # It has ended meanwhile.
            kind = "driver" if process == driver else kind_of(" ".join(process.cmdline()))
            memory, files, threads = process.memory_full_info().uss, process.num_fds(), process.num_threads()
            found[f"{kind}: memory, MB"] += memory / 1e6
            found[f"{kind}: descriptors"] += files
            found[f"{kind}: threads"] += threads
            found[f"{kind}: processes"] += 1
    return dict(found)


def shared_memory_bytes(family: Collection[psutil.Process]) -> int:
    """Bytes of the files in /dev/shm that the processes of a run map, or that have the pid of one in their names."""
    found: dict[int, int] = {}
    for process in family:
        with suppress(OSError):  # It has ended.
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                if str(SHARED_MEMORY) in line:
                    begin, end = (int(one, 16) for one in line.split()[0].split("-"))
                    inode = int(line.split()[4])
                    found[inode] = max(found.get(inode, 0), end - begin)
    pids = {str(process.pid) for process in family}
    for entry in os.scandir(SHARED_MEMORY):
        with suppress(FileNotFoundError):
            if pids & set(re.findall(r"\d+", entry.name)):
                found[entry.inode()] = entry.stat().st_size
    return sum(found.values())


def bytes_of(folder: Path) -> int:
    """Bytes on the disk of all files in a folder, as they are at this moment."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(where, name)).st_blocks * 512
    return total


def by_file(folder: Path) -> dict[str, int]:
    """Bytes of each entry of a folder."""
    found = {}
    for entry in folder.iterdir():
        with suppress(FileNotFoundError):
            found[entry.name] = bytes_of(entry) if entry.is_dir() else entry.stat().st_blocks * 512
    return found
