"""An OTLP endpoint over HTTP with the published protobufs, which keeps the spans that it gets."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

SERVICE = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")


@dataclass(frozen=True)
class Received:
    """A span as it came."""

    resource: dict[str, str]
    name: str
    trace: bytes
    id: bytes
    parent: bytes
    begin: int
    end: int
    attributes: dict[str, Any]

    @property
    def process(self) -> str:
        return self.resource["service.instance.id"]

    @property
    def track(self) -> str:
        return self.attributes["thread.name"]


@dataclass
class Receiver:
    url: str
    spans: list[Received] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    """Headers of the last request"""
    num_requests: int = 0

    def by_id(self) -> dict[bytes, Received]:
        found = {span.id: span for span in self.spans}
        assert len(found) == len(self.spans)
        return found


@contextmanager
def otlp_receiver(*, status: int = 200, hangs: bool = False) -> Iterator[Receiver]:
    """A receiver on a free port that answers with `status`, or takes requests and never answers."""
    released = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            receiver.num_requests += 1
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if hangs:
                released.wait(120)
                return
            assert (self.path, self.headers["Content-Type"]) == ("/v1/traces", "application/x-protobuf")
            receiver.headers = dict(self.headers)
            if status == 200:
                receiver.spans += _spans(body)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(SERVICE.ExportTraceServiceResponse().SerializeToString())

        def log_message(self, format: str, *arguments: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver = Receiver(f"http://127.0.0.1:{server.server_address[1]}")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield receiver
    finally:
        released.set()
        server.shutdown()
        server.server_close()


def _spans(body: bytes) -> Iterator[Received]:
    for of_resource in SERVICE.ExportTraceServiceRequest.FromString(body).resource_spans:
        resource = {one.key: one.value.string_value for one in of_resource.resource.attributes}
        for of_scope in of_resource.scope_spans:
            for span in of_scope.spans:
                yield Received(
                    resource=resource,
                    name=span.name,
                    trace=span.trace_id,
                    id=span.span_id,
                    parent=span.parent_span_id,
                    begin=span.start_time_unix_nano,
                    end=span.end_time_unix_nano,
                    attributes={one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes},
                )
