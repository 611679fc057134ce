"""The environments that slimrl knows, by name."""

from dataclasses import dataclass
from pathlib import Path

LOCKS = Path(__file__).parent / "locks"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An environment that others made."""

    name: str
    summary: str
    """What it is, in a line"""
    packages: str
    """Packages that it is made of, each with its version and licence"""
    size_mb: int
    """Size of the virtual environment"""
    programs: tuple[str, ...] = ()
    """Programs of the system that it needs"""

    @property
    def lock(self) -> Path:
        """Requirements of its virtual environment, every package with its version."""
        return LOCKS / f"{self.name}.txt"


_ENTRIES: tuple[Entry, ...] = ()
ENVIRONMENTS = {entry.name: entry for entry in _ENTRIES}
