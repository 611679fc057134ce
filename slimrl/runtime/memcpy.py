"""The speed of a copy in memory, against which a resync is measured."""

import statistics
import time

import numpy as np

COPY_BYTES = 256 * 1024**2
REPEATS = 5


def memcpy_gb_per_s(nbytes: int = COPY_BYTES, repeats: int = REPEATS) -> float:
    """Of one thread between two buffers that are in memory already and in no cache; each byte counted once.

    The median, in 1e9 bytes per second.
    """
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - start)
    return nbytes / statistics.median(seconds) / 1e9
