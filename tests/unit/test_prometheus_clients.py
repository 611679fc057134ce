"""Whoever asks the endpoint for Prometheus and goes away, or never ends a request, costs the run nothing."""

import socket
import struct
import time

import pytest

from slimrl.observability import prometheus_tracker
from slimrl.observability.prometheus_tracker import PrometheusTracker


def connect(tracker: PrometheusTracker) -> socket.socket:
    return socket.create_connection(("127.0.0.1", tracker.port), timeout=20)


def test_a_client_that_goes_away_writes_nothing_to_the_terminal(monkeypatch, capfd: pytest.CaptureFixture[str]):
    tracker = PrometheusTracker("127.0.0.1:0", "run")
    answered = []

    def answer(path: str, host: str) -> tuple[int, str, bytes]:
        time.sleep(0.3)
        answered.append(path)
        return 200, "text/plain", bytes(20_000_000)

    monkeypatch.setattr(tracker, "answer", answer)
    with connect(tracker) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        # Closed with a reset.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    deadline = time.monotonic() + 20
    while not answered and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    assert answered == ["/metrics"]
    assert capfd.readouterr().err == ""


def test_a_request_that_does_not_end_is_given_up(monkeypatch):
    monkeypatch.setattr(prometheus_tracker, "CLIENT_S", 0.5)
    tracker = PrometheusTracker("127.0.0.1:0", "run")
    with connect(tracker) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\n")
        assert client.recv(1) == b""
