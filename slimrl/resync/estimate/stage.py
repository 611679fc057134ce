"""What is done to a bucket at a time: its seconds, and what it puts on the links."""

from collections import Counter
from dataclasses import dataclass, field

from slimrl.resync.estimate.machine import GB, Machine


@dataclass
class Stage:
    seconds: float = 0.0
    link_bytes: Counter[str] = field(default_factory=Counter)
    """By kind of link, all machines together."""


def copy_seconds(nbytes: float, machine: Machine) -> float:
    """Of a copy within the memory of one GPU, which reads and writes."""
    return 2 * nbytes / (machine.memory_gb_per_s * GB)
