"""The speed of a copy in memory, against which a resync is measured."""

import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

COPY_BYTES = 256 * 1024**2
REPEATS = 5


def memcpy_gb_per_s(threads: int = 1) -> float:
    """Throughput of memcpy on several threads together, each between two buffers that are in memory already and in no
    cache; bytes are counted once.

    The median, in 1e9 bytes per second.
    """
    pairs = [(np.ones(COPY_BYTES, np.uint8), np.zeros(COPY_BYTES, np.uint8)) for _ in range(threads)]
    seconds = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(REPEATS):
            start = time.perf_counter()
            list(pool.map(lambda pair: np.copyto(pair[1], pair[0]), pairs))
            seconds.append(time.perf_counter() - start)
    return threads * COPY_BYTES / statistics.median(seconds) / 1e9
