"""A stand-in for the Hugging Face Hub on this machine, which counts what is downloaded from it."""

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """One model at one commit."""

    def __init__(self, model_id: str, files: dict[str, bytes]) -> None:
        self.model_id, self.files = model_id, files
        self.downloads: Counter[str] = Counter()
        self.url = ""

    def answer(self, path: str) -> tuple[bytes, dict[str, str]] | None:
        """Content and headers of a page; None if there is none."""
        path = path.partition("?")[0]
        if path == f"/api/models/{self.model_id}/revision/main":
            return json.dumps({"id": self.model_id, "sha": COMMIT}).encode(), {}
        if path == f"/api/models/{self.model_id}/tree/{COMMIT}":
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": _digest(content)}
                for name, content in self.files.items()
            ]
            return json.dumps(tree).encode(), {}
        name = path.removeprefix(f"/{self.model_id}/resolve/{COMMIT}/")
        if name not in self.files:
            return None
        return self.files[name], {"ETag": f'"{_digest(self.files[name])}"', "X-Repo-Commit": COMMIT}


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    """`hub` answers at `hub.url` until the end of the block."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(with_content=False)

        def do_GET(self) -> None:
            self._answer(with_content=True)

        def _answer(self, *, with_content: bool) -> None:
            content, headers = hub.answer(self.path) or (b"{}", {"X-Error-Code": "RepoNotFound"})
            found = hub.answer(self.path) is not None
            if with_content and "/resolve/" in self.path:
                hub.downloads[self.path.rpartition(f"/{COMMIT}/")[2]] += 1
                # Long enough for another process to ask for the same file.
                time.sleep(0.3)
            self.send_response(200 if found else 404)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_content:
                self.wfile.write(content)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
