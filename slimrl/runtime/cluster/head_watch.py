"""The head of the cluster, without which a run cannot go on: where it is lost, the run says so and ends.

Ray by itself ends the driver's process a minute after that without a word, so this comes before.
"""

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from slimrl.observability.terminal import plain_console

LOST_S = 45.0
"""Seconds without a connection to the head after which it is lost; Ray's own 60 begin a little later."""
POLL_S = 2.0
CONNECT_S = 5.0

log = logging.getLogger(__name__)


@contextmanager
def watching_head(
    address: str, lost: Callable[[str], None] | None = None, *, lost_s: float = LOST_S, poll_s: float = POLL_S
) -> Iterator[None]:
    """Call `lost` with a message, from a thread, if nobody takes connections at HOST:PORT for `lost_s` seconds.

    Without `lost` the message is printed, and the process ends at once with exit code 1: nothing that Ray is asked
    would be answered. Processes of the run end as if the driver had been killed.
    """
    ended = threading.Event()
    arguments = (address, lost or _end, ended, lost_s, poll_s)
    watch = threading.Thread(target=_watch, args=arguments, name="head watch", daemon=True)
    watch.start()
    try:
        yield
    finally:
        ended.set()
        watch.join(CONNECT_S + poll_s)


def _watch(address: str, lost: Callable[[str], None], ended: threading.Event, lost_s: float, poll_s: float) -> None:
    seen = time.monotonic()
    while not ended.wait(poll_s):
        if _answers(address):
            seen = time.monotonic()
        elif time.monotonic() - seen > lost_s:
            lost(
                f"Ray's head at {address} is lost: nobody has answered there for {lost_s:g} s. "
                "Start Ray again, and the same command with --resume goes on from the newest checkpoint."
            )
            return


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except OSError:
        return False
    return True


def _end(message: str) -> None:
    log.error("%s", message)
    logging.shutdown()
    plain_console(stderr=True).print(f"failed: {message}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
