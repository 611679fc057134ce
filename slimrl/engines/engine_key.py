"""The key with which the engines of a run obey: whoever sends it may have them generate, pause or load weights.

It is made for each run and kept in memory alone. An engine's process gets it through a pipe: a process's arguments can
be read by every user of the machine.
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_MAX_BYTES = 4096


@dataclass(frozen=True)
class EngineKey:
    """The secret key of a run's engines. Its representation does not show it, so neither do messages and logs of what
    has it."""

    value: str = field(repr=False)

    @property
    def headers(self) -> dict[str, str]:
        """Headers of a request to an engine."""
        return {"authorization": f"Bearer {self.value}"}

    @contextmanager
    def handed_over(self) -> Iterator[int]:
        """A descriptor from which a process that inherits it can `receive` the key."""
        reader, writer = os.pipe()
        try:
            os.write(writer, self.value.encode())
            os.close(writer)
            yield reader
        finally:
            os.close(reader)

    @classmethod
    def receive(cls, descriptor: int) -> "EngineKey":
        """The key that was handed over through this descriptor, which is closed."""
        with os.fdopen(descriptor, "rb") as pipe:
            return cls(pipe.read(_MAX_BYTES).decode())


def new_key() -> EngineKey:
    return EngineKey(secrets.token_urlsafe(32))
