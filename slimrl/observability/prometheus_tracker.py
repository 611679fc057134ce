"""The metrics of a run's last step for Prometheus, which reads them by HTTP from the driver.

All are one gauge, `slimrl`, with the labels `run` and `metric`: names of metrics have slashes, which those of
Prometheus may not have.
"""

import threading
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


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
        tracker = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                known = self.path.split("?")[0] == "/metrics"
                body = tracker.text().encode() if known else b""
                self.send_response(200 if known else 404)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *arguments: object) -> None:
                """A line for each request says nothing."""

        host, _, port = address.rpartition(":")
        try:
            self._server = ThreadingHTTPServer((host, int(port)), Handler)
        except (OSError, ValueError, OverflowError) as error:
            raise ValueError(f"tracking.prometheus: {address}: cannot be listened at as HOST:PORT: {error}") from error
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()

    def text(self) -> str:
        """The last number of each metric in Prometheus's text format."""
        run = self._run.translate(_ESCAPED)
        lines = [
            f'slimrl{{run="{run}",metric="{name.translate(_ESCAPED)}"}} {float(number)!r}\n'
            for name, number in self._numbers.items()
        ]
        return "".join(["# TYPE slimrl gauge\n", *lines])

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
