"""Speeds of a machine and its network, and what a step of a resync costs with them.

The defaults are for nodes with 8 H100 and a 400 Gb/s adapter for each GPU. Speeds of links are nominal and not reached
in practice; overheads are rough. `slimrl resync estimate` has an option for each speed.
"""

from collections import Counter
from dataclasses import asdict, dataclass, field
from math import isfinite

GB = 10**9


@dataclass(frozen=True, kw_only=True)
class Machine:
    memory_gb_per_s: float = 3350.0
    """Bandwidth of a GPU's memory, reading and writing together, so that a copy takes twice its bytes: HBM3 of an H100
    SXM (data sheet)."""
    nvlink_gb_per_s: float = 450.0
    """Bandwidth of NVLink into or out of one GPU, to all others of its node: half of the 900 GB/s of both directions
    (H100 data sheet)."""
    network_gb_per_s: float = 50.0
    """Bandwidth into or out of one network adapter: 400 Gb/s, InfiniBand NDR or Ethernet. Each GPU has one."""
    pcie_gb_per_s: float = 64.0
    """Bandwidth between a GPU and the memory of its host, each way: 16 lanes of PCI Express 5.0."""
    disk_write_gb_per_s: float = 4.0
    """Bandwidth of one node writing to the shared file system; assumed."""
    disk_read_gb_per_s: float = 8.0
    """Bandwidth of one node reading from the shared file system; assumed."""
    disk_read_total_gb_per_s: float = 40.0
    """Bandwidth of all nodes together reading from the shared file system; assumed."""
    gather_us: float = 20.0
    """Time of a rank for one piece, besides the bytes: finding the live weight and launching a copy; assumed."""
    load_us: float = 50.0
    """Time of an engine rank for one tensor, besides the bytes, in SGLang's `load_weights`; assumed."""
    settle_us: float = 100.0
    """Time of a trainer rank for the scales of one piece of a quantised matrix, besides the bytes: twice the 42 us of
    the same calls on a CPU, for launching a dozen kernels."""
    stage_us: float = 20.0
    """Time of a trainer rank for one region of a message, besides the bytes: finding it in the live weights and
    launching a copy; twice the 10 us that it takes on a CPU."""
    quantize_us: float = 80.0
    """The same for a region that is quantised; twice the 40 us of a CPU."""
    place_us: float = 20.0
    """Time of an engine rank for one region of a message, besides the bytes: launching the copy to its place; as for
    `stage_us`."""
    message_us: float = 30.0
    """Time of a rank for one message of a round, besides the bytes: its numbers through gloo, and a call of NCCL;
    assumed."""
    round_us: float = 100.0
    """Time of a round trip of numbers over TCP, which precedes the messages of a round; assumed."""

    def __post_init__(self) -> None:
        """Raises ValueError: not a finite number, a speed that is not above 0, or an overhead below 0."""
        for name, value in asdict(self).items():
            if not isfinite(value):
                raise ValueError(f"{name} {value}: must be a finite number")
            if value < 0 or (value == 0 and name.endswith("_per_s")):
                raise ValueError(f"{name} {value}: must be {'above' if name.endswith('_per_s') else 'at least'} 0")

    def copy_seconds(self, nbytes: float) -> float:
        """Seconds of a copy within the memory of one GPU, which reads and writes."""
        return 2 * nbytes / (self.memory_gb_per_s * GB)


@dataclass
class Cost:
    """Cost of one step of a bucket."""

    seconds: float = 0.0
    link_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes by kind of link, of all machines together"""
