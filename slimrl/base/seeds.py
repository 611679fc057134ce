"""Seeds derived from the use that they have, never from global state or arrival order."""

import hashlib

MAX_SEED = 2**31 - 1
"""Seeds are in 0..MAX_SEED, which every library accepts."""


def derive_seed(*parts: int | str) -> int:
    """A seed that depends on all parts and nothing else, for example (run seed, step, trajectory id)."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") % (MAX_SEED + 1)
