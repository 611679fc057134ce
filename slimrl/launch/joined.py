"""`python -m slimrl.launch.joined HOST:PORT COUNT`: returns when that many nodes are in the Ray cluster there.

A program of its own, since connecting to a cluster that does not answer blocks for long; the driver ends it when the
job ends meanwhile.
"""

import logging
import sys
import time

import ray

TIMEOUT_S = 300.0
"""How long the nodes may take."""

POLL_S = 0.5


def main() -> None:
    """Exit code 0 when they are there; TimeoutError after TIMEOUT_S."""
    address, count = sys.argv[1], int(sys.argv[2])
    deadline = time.monotonic() + TIMEOUT_S
    found = 0
    while found < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{found} of {count} nodes are in the Ray cluster at {address} after {TIMEOUT_S:.0f} s")
        if ray.is_initialized() or _connects(address):
            found = sum(node["Alive"] for node in ray.nodes())
        time.sleep(POLL_S)
    ray.shutdown()


def _connects(address: str) -> bool:
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (RuntimeError, ConnectionError, ValueError) as error:
        print(f"not yet: {error}", file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    main()
