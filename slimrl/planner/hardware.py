"""The GPUs and links that a plan is made for. The defaults are of nodes with 8 H100."""

from dataclasses import asdict, dataclass, field

from slimrl.resync.estimate.machine import Machine

GB = 10**9
TERA = 10**12


@dataclass(frozen=True, kw_only=True)
class Hardware:
    gpus_per_node: int = 8
    gpu_memory_gib: float = 80.0
    reserve_gib: float = 4.0
    """Of each GPU, for CUDA contexts, communication buffers and what the allocator cannot use; assumed."""
    host_memory_gib: float = 1800.0
    """Of a node, for what trainer ranks keep there: of a DGX H100's 2 TB (data sheet) without some for processes."""
    peak_tflops: float = 989.0
    """Dense bf16 of an H100 SXM (data sheet)."""
    mfu: float = 0.4
    """Share of the peak that a stage reaches while it computes; assumed."""
    expert_load: float = 1.0
    """Tokens of the busiest expert-parallel rank, over the mean."""
    host_adam_gparams_per_s: float = 0.4
    """Parameters, in 1e9, that one thread of the host's processors updates with Adam; measured on one of a server."""
    links: Machine = field(default_factory=Machine)

    def __post_init__(self) -> None:
        """Raises ValueError for what no GPU has."""
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
