"""What a run asks over HTTP: a reward service, which may be away, and a collector of spans, which may hang."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HANGS_S = 300.0


def reward(item: dict[str, Any]) -> float:
    """One for the label in the last text, and a little for its length, so that rewards of a group differ."""
    text = str(item["messages"][-1]["content"])
    return float(str(item["label"]) in text) + 0.1 * (len(text) % 7)


class Service:
    """A server of POST at a port of its own; `reward_away` and `spans_hang` are its faults."""

    def __init__(self) -> None:
        self.reward_away, self.spans_hang = threading.Event(), threading.Event()
        self.refused, self.hung = 0, 0
        """Requests that met the one fault and the other"""
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if self.path == "/reward":
                    service.answer_reward(self, body)
                else:
                    service.answer_spans(self)

            def log_message(self, *_: Any) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def answer_reward(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        if self.reward_away.is_set():
            # The connection ends without an answer.
            self.refused += 1
            return
        rewards = [reward(item) for item in json.loads(body)["trajectories"]]
        send(handler, json.dumps({"rewards": rewards}).encode())

    def answer_spans(self, handler: BaseHTTPRequestHandler) -> None:
        self.hung += self.spans_hang.is_set()
        deadline = time.monotonic() + HANGS_S
        while self.spans_hang.is_set() and time.monotonic() < deadline:
            time.sleep(0.2)
        send(handler, b"{}")

    def close(self) -> None:
        self.spans_hang.clear()
        self._server.shutdown()
        self._server.server_close()


def send(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    try:
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)
    except ConnectionError:
        # Whoever asked has gone.
        return
