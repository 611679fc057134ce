"""`python -m slimrl.launch.wait_for_nodes HOST:PORT COUNT`: waits until the Ray cluster there has that many nodes.

A program of its own, because connecting to a cluster that does not answer blocks for long. The driver ends it if the
job ends meanwhile.
"""

import logging
import sys
import time

import ray
from ray.exceptions import RayError

TIMEOUT_S = 300.0
"""Seconds that the nodes may take."""

POLL_S = 0.5


def main() -> None:
    """Raises TimeoutError after TIMEOUT_S."""
    address, count = sys.argv[1], int(sys.argv[2])
    deadline = time.monotonic() + TIMEOUT_S
    found = 0
    while found < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{found} of {count} nodes are in the Ray cluster at {address} after {TIMEOUT_S:.0f} s")
        try:
            if not ray.is_initialized():
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            found = sum(node["Alive"] for node in ray.nodes())
        except (RuntimeError, ConnectionError, ValueError, RayError) as error:
            print(f"not yet: {error}", file=sys.stderr)
        time.sleep(POLL_S)
    ray.shutdown()


if __name__ == "__main__":
    main()
