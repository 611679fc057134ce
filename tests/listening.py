"""Servers that tests start as processes."""

import socket
import time


def wait_for_port(port: int, timeout_s: float = 60) -> None:
    """Until something listens there."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise TimeoutError(f"nothing listens at port {port}")
