"""Options of a conversion, apart from it: `--help` must not wait for torch."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a conversion in either direction."""

    dtype: str | None = None
    """As torch prints it; None for that of the source. Tensors that a model keeps in float32 stay so."""
    processes: int = 1
    resume: bool = False
    check: bool = True
    """Read every written file back and compare it with the checksums of its tensors."""
