"""The hardware of a plan; by default nodes with 8 H100."""

from dataclasses import asdict, dataclass, field

from slimrl.estimates.resync.machine import GB as GB
from slimrl.estimates.resync.machine import Machine

TERA = 10**12


@dataclass(frozen=True, kw_only=True)
class Hardware:
    gpus_per_node: int = 8
    gpu_memory_gib: float = 80.0
    reserve_gib: float = 4.0
    """Reserve of each GPU, for CUDA contexts, communication buffers and fragmentation; assumed."""
    host_memory_gib: float = 1800.0
    """Host memory of a node, for trainer ranks: a DGX H100's 2 TB (data sheet) less some for processes."""
    peak_tflops: float = 989.0
    """Peak throughput in dense bf16 of an H100 SXM (data sheet)."""
    mfu: float = 0.4
    """Fraction of the peak that a computing stage reaches; assumed."""
    expert_load: float = 1.0
    """Tokens of the busiest expert-parallel rank, over the mean of all."""
    host_adam_gparams_per_s: float = 0.4
    """Parameters in 1e9 per second that a CPU thread updates with Adam; measured on a server's CPU."""
    links: Machine = field(default_factory=Machine)

    def __post_init__(self) -> None:
        """Raises ValueError for impossible values."""
        for name, value in asdict(self).items():
            option = f"--{name.replace('_', '-')} {value}"
            if name == "links":
                continue
            if name == "reserve_gib":
                if not 0 <= value < self.gpu_memory_gib:
                    raise ValueError(f"{option}: must be at least 0 and below the GPU's {self.gpu_memory_gib} GiB")
            elif value <= 0:
                raise ValueError(f"{option}: must be above 0")
        if self.mfu > 1:
            raise ValueError(f"--mfu {self.mfu}: must be at most 1")
        if self.expert_load < 1:
            raise ValueError(f"--expert-load {self.expert_load}: must be at least 1")
