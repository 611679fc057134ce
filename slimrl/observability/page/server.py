"""Serves the page of runs that go on to a browser of this machine, and to nobody else.

1. It listens at 127.0.0.1 alone. Another user of the machine, or a page of another site in the same browser, lacks the
   random key of the address, without which every request is refused. A name of another site that is made to mean
   127.0.0.1 stands in the request's `Host`, and is refused too. The port there may be another, as through `ssh -L`.
2. `/` is the page as `--html` writes it, but without the packed parts, with the version that it shows.
3. `/data` is asked by the page every few seconds. It answers 204 as long as `version` is the newest one, and else the
   data that the page then has, with its version. So there is no state of a reader here, and none is lost.
4. `/part` has one packed part, which the page asks for when it is to be shown. Names of conversations and tokens
   follow from their content, so that they mean the same in every version.
"""

import secrets
from collections.abc import Iterable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from slimrl.observability.page.document import page_texts
from slimrl.observability.page.follower import Follower
from slimrl.observability.page.packed import script_json

HOST = "127.0.0.1"
HOST_NAMES = (HOST, "localhost")
"""Names by which a browser may ask"""
REQUEST_TIMEOUT_S = 60.0
"""How long a connection may stand still"""
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class PageServer:
    """Use: `serve` until it is interrupted."""

    def __init__(self, follower: Follower, port: int = 0) -> None:
        """
        Args:
            port: to listen at; 0 for one that is free.

        Raises:
            ValueError: nothing can listen at the port.
        """
        self.key = secrets.token_urlsafe(24)

        class Handler(_Handler):
            source, key = follower, self.key

        try:
            self._server = ThreadingHTTPServer((HOST, port), Handler)
        except (OSError, OverflowError) as error:
            raise ValueError(f"--port {port}: cannot be listened at: {error}. Leave it out for a free one.") from error

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self._server.server_address[1]}/?key={self.key}"

    def serve(self) -> None:
        """Answer until `stop` is called in another thread, or an exception such as KeyboardInterrupt comes."""
        try:
            self._server.serve_forever()
        finally:
            self._server.server_close()

    def stop(self) -> None:
        self._server.shutdown()


class _Handler(BaseHTTPRequestHandler):
    source: Follower
    key: str
    timeout = REQUEST_TIMEOUT_S

    def do_GET(self) -> None:
        # A browser that goes away, or stands still, needs no answer.
        with suppress(ConnectionError, TimeoutError):
            self._answer()

    def _answer(self) -> None:
        url = urlsplit(self.path)
        asked = {name: values[0] for name, values in parse_qs(url.query).items()}
        if (refused := self._why_refused(asked.get("key", ""))) is not None:
            self._send(403, [refused])
            return
        try:
            if url.path == "/":
                version, contents = self.source.newest()
                self._send(200, page_texts(contents.title, _with_version(contents.data, version), {}, "'self'"), "html")
            elif url.path == "/data":
                version, contents = self.source.newest()
                if asked.get("version") == str(version):
                    self._send(204, [])
                else:
                    self._send(200, [script_json(_with_version(contents.data, version))], "json")
            elif url.path == "/part" and (part := self.source.part(asked.get("name", ""))) is not None:
                self._send(200, [part])
            else:
                self._send(404, ["there is no such part of the page"])
        except (ValueError, OSError) as error:
            if isinstance(error, ConnectionError | TimeoutError):
                raise
            self._send(503, [str(error)])

    def _why_refused(self, key: str) -> str | None:
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if host not in HOST_NAMES:
            return f"This page is only there at the host {HOST}."
        if not secrets.compare_digest(key.encode(), self.key.encode()):
            return "The key in the address is wrong. Open the address that slimrl report --follow has printed."
        return None

    def _send(self, status: int, texts: Iterable[str], kind: str = "plain") -> None:
        body = b"".join(text.encode() for text in texts)
        self.send_response(status)
        mime = "application/json" if kind == "json" else f"text/{kind}; charset=utf-8"
        for name, value in {**HEADERS, "Content-Type": mime, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """A line for each request says nothing."""


def _with_version(data: dict[str, Any], version: int) -> dict[str, Any]:
    return {**data, "version": version}
