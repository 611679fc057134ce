"""Free TCP ports for servers that take many seconds to start.

They lie below the kernel's ephemeral range: a port within it may become the local end of any connection before the
server binds it.
"""

import random
import socket

FIRST_PORT, LAST_PORT = 15_000, 32_000
"""Linux's ephemeral ports begin at 32768; well-known servers mostly use ports below 15000."""

ATTEMPTS = 200


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago; raises OSError as free_ports."""
    return free_ports(1, host)[0]


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Different ports that were free a moment ago.

    Raises:
        OSError: too few of ATTEMPTS random ports are free.
    """
    # Not seeded by the run: two runs with the same seed must not try the same ports.
    source = random.SystemRandom()
    found: list[int] = []
    for port in source.sample(range(FIRST_PORT, LAST_PORT + 1), ATTEMPTS):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"no free port on {host} among {ATTEMPTS} tried between {FIRST_PORT} and {LAST_PORT}")
