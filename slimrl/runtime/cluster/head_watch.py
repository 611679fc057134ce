"""The head of the cluster, without which a run cannot go on: where it is lost, the run says so and ends.

Ray itself ends the driver's process without a word: within a second or two where the driver's own node goes with the
head, else a minute later. So a connection to the head is kept, whose end is known at once and said before that.
"""

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from slimrl.observability.terminal import plain_console

LOST_S = 45.0
"""Seconds without a connection to the head after which it is lost; Ray's own 60 begin a little later."""
POLL_S = 0.2
CONNECT_S = 5.0
ATTEMPTS = 2
"""Connections in a row that fail before the head is said to be lost; on a loaded machine one may be too slow."""

KEEPALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
"""Seconds, and number of probes without an answer, after which a machine without power ends the connection (tcp(7))"""

log = logging.getLogger(__name__)


@contextmanager
def watching_head(
    address: str,
    say: Callable[[str], None] | None = None,
    end: Callable[[], None] | None = None,
    *,
    lost_s: float = LOST_S,
    poll_s: float = POLL_S,
) -> Iterator[None]:
    """Say so, from a thread, once nobody takes connections at HOST:PORT any more; `end` after `lost_s` seconds of it.

    By default the message goes to the log and the terminal, and the process ends at once with exit code 1: nothing
    that Ray is asked would be answered. Processes of the run end as if the driver had been killed.
    """
    ended = threading.Event()
    arguments = (address, say or _say, end or _end, ended, lost_s, poll_s)
    watch = threading.Thread(target=_watch, args=arguments, name="head watch", daemon=True)
    watch.start()
    try:
        yield
    finally:
        ended.set()
        watch.join(CONNECT_S + poll_s)


def _watch(
    address: str,
    say: Callable[[str], None],
    end: Callable[[], None],
    ended: threading.Event,
    lost_s: float,
    poll_s: float,
) -> None:
    seen, connection, failures = time.monotonic(), None, 0
    while not ended.wait(poll_s):
        if connection is None or _is_closed(connection):
            # The head itself closes a connection that asks nothing, after a while.
            connection = _connect(address)
        if connection is not None:
            seen, failures = time.monotonic(), 0
            continue
        failures += 1
        if failures == ATTEMPTS:
            say(
                f"Ray's head at {address} is lost: nobody answers there. The run ends where it is not back within "
                f"{lost_s:g} s; on a cluster with a head, --resume goes on from the newest checkpoint."
            )
        if time.monotonic() - seen > lost_s:
            end()
            return
    if connection is not None:
        connection.close()


def _connect(address: str) -> socket.socket | None:
    host, _, port = address.rpartition(":")
    with suppress(OSError):
        connection = socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S)
        if connection.getsockname() == connection.getpeername():
            # The system gave it that very port, at which nobody listens.
            connection.close()
            return None
        connection.setblocking(False)
        for option, value in KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return connection
    return None


def _is_closed(connection: socket.socket) -> bool:
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    connection.close()
    return True


def _say(message: str) -> None:
    log.error("%s", message)
    plain_console(stderr=True).print(f"failed: {message}")
    sys.stderr.flush()


def _end() -> None:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
