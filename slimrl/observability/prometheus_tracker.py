"""A run for Prometheus, which reads it by HTTP from the driver.

1. `/metrics` has the metrics of the last step as one gauge, `slimrl`, with the labels `run` and `metric`: names of
   metrics have slashes, which those of Prometheus may not have. Beside it is what the run does now (Live).
2. `/engines` names the engines for Prometheus's HTTP service discovery, and `/engines/NAME` passes on the metrics that
   SGLang has of one. So one address is reached, which stays the same where engines come and go.
"""

import json
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Protocol
from urllib.parse import quote, unquote

import httpx
from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ENGINE_S = 5.0
"""Seconds for an engine to answer a scrape."""
CLIENT_S = 30.0
"""Seconds for whoever asks to send a request and to take its answer."""


class Live(Protocol):
    """What a run does now. Used by several threads."""

    def collect(self) -> Iterator[Metric]:
        """All families of metrics."""

    def engine_urls(self) -> Mapping[str, str]:
        """Addresses of the engines, by name."""


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        # Whoever asked has gone; the terminal is the run's.
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class PrometheusTracker:
    """See Tracker."""

    def __init__(self, address: str, run: str) -> None:
        """
        Args:
            address: HOST:PORT to listen at, with port 0 at any; `port` says which.

        Raises:
            ValueError: it is none, or cannot be listened at.
        """
        self._run, self._numbers = run, dict[str, float]()
        self._live: Live | None = None
        tracker = self

        class Handler(BaseHTTPRequestHandler):
            timeout = CLIENT_S

            def do_GET(self) -> None:
                status, kind, body = tracker.answer(self.path.split("?")[0], self.headers.get("Host", ""))
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *arguments: object) -> None:
                """A line for each request says nothing."""

        host, _, port = address.rpartition(":")
        try:
            self._server = _Server((host, int(port)), Handler)
        except (OSError, ValueError, OverflowError) as error:
            raise ValueError(f"tracking.prometheus: {address}: cannot be listened at as HOST:PORT: {error}") from error
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()

    @contextmanager
    def showing(self, live: Live) -> Iterator[None]:
        """Show what the run does, within the block."""
        self._live = live
        try:
            yield
        finally:
            self._live = None

    def answer(self, path: str, host: str) -> tuple[int, str, bytes]:
        """Status, type and body of the answer to a request.

        Args:
            host: address by which the client has reached this one.
        """
        if path == "/metrics":
            return 200, CONTENT_TYPE, generate_latest(self)
        live = self._live  # once: the run may end meanwhile
        urls = {} if live is None else live.engine_urls()
        if path == "/engines":
            found = [
                {
                    "targets": [host],
                    "labels": {"__metrics_path__": f"/engines/{quote(name)}", "run": self._run, "engine": name},
                }
                for name in urls
            ]
            return 200, "application/json", json.dumps(found).encode()
        if path.startswith("/engines/") and (url := urls.get(unquote(path.removeprefix("/engines/")))):
            try:
                answer = httpx.get(f"{url}/metrics", timeout=ENGINE_S, trust_env=False)
            except httpx.HTTPError as error:
                return 502, "text/plain", f"the engine does not answer: {error!r}\n".encode()
            return answer.status_code, answer.headers.get("Content-Type", CONTENT_TYPE), answer.content
        return 404, "text/plain", b""

    def collect(self) -> Iterator[Metric]:
        """All families of `/metrics`."""
        family = GaugeMetricFamily("slimrl", "Metrics of the last step", labels=["run", "metric"])
        for name, number in self._numbers.items():
            family.add_metric([self._run, name], number)
        yield family
        if (live := self._live) is not None:
            yield from live.collect()

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        # Replaced as a whole: another thread reads it.
        self._numbers = {**self._numbers, "step": step, **numbers}

    def log_texts(self, step: int, texts: Sequence[str]) -> None:
        """Prometheus has no texts."""

    def rewind(self, step: int) -> None:
        """Nothing: it shows the last step alone."""

    def close(self, *, failed: bool) -> None:
        self._server.shutdown()
        self._server.server_close()
