"""The process that sends spans by OTLP over HTTP, see span_sender.py; run as a module, it imports OpenTelemetry's SDK.

A step is one trace. Its root is the span of the whole step; the children of a span are those inside it on its track,
and of the root all that are outermost on theirs. An episode in a worker is a child of the driver's span of it.
"""

import json
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from itertools import batched
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import SpanContext, TraceFlags

from slimrl.base.lifeline import end_with
from slimrl.observability.profiling.nesting import nested
from slimrl.observability.profiling.recorder import STEP
from slimrl.observability.profiling.span_sender import MOST_WAITING
from slimrl.observability.profiling.trace import Span, read_spans

BATCH_SPANS = 512
"""Spans of a request, as by default in the SDK."""
SETTLE_S = 0.1
"""Seconds after a step's end until its files are read: spans that ended with it are in them by then."""
NICE = 5
"""How much less of a busy CPU this process takes than the run's."""
EPISODE = "episode"


def otel_spans(spans: Sequence[Span], run: str) -> list[ReadableSpan]:
    """The spans of a step as one trace; none where the step has no span of its own, since its driver was killed."""
    if (root := next((span for span in spans if span.name == STEP), None)) is None:
        return []
    ids = RandomIdGenerator()
    trace = ids.generate_trace_id()
    contexts = {id(span): _context(trace, ids.generate_span_id()) for span in spans}
    episodes = {span.details["id"]: span for span in spans if span.name == EPISODE and span.process == root.process}
    resources = {process: _resource(run, process) for process in {span.process for span in spans}}
    made = []
    for span, outer in nested(spans):
        if outer is None and span.name == EPISODE and span.process != root.process:
            outer = episodes.get(span.details["id"])
        outer = None if span is root else outer or root
        made.append(
            ReadableSpan(
                span.name,
                context=contexts[id(span)],
                parent=None if outer is None else contexts[id(outer)],
                resource=resources[span.process],
                attributes={
                    **{f"slimrl.{name}": value for name, value in span.details.items()},
                    "thread.name": span.track,
                },
                start_time=span.begin,
                end_time=span.end,
            )
        )
    return made


def _context(trace: int, span: int) -> SpanContext:
    return SpanContext(trace, span, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _resource(run: str, process: str) -> Resource:
    """OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES replace the service's name."""
    given = Resource({"service.name": "slimrl"}).merge(OTELResourceDetector().detect())
    return given.merge(Resource({"service.instance.id": process, "slimrl.run": run}))


class LastError(logging.Handler):
    """Keeps the last message that the exporter logs, which says why it failed."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


class StepSender:
    """Sends one step after another."""

    def __init__(self, exporter: SpanExporter, run: str, errors: LastError) -> None:
        self._exporter, self._run, self._errors = exporter, run, errors

    def send(self, folder: Path) -> dict[str, object]:
        """Send the spans of a step; returns its line of the report. The first failure drops what is left."""
        sent, error = 0, ""
        try:
            spans = otel_spans(read_spans(folder), self._run)
        except ValueError as broken:
            return self.dropped(folder, str(broken))
        for batch in batched(spans, BATCH_SPANS):
            if self._exporter.export(batch) is not SpanExportResult.SUCCESS:
                error = self._errors.text
                break
            sent += len(batch)
        return {"step": folder.name, "sent": sent, "dropped": len(spans) - sent, "error": error}

    def dropped(self, folder: Path, error: str) -> dict[str, object]:
        """The line of a step of which nothing is sent."""
        lines = sum(path.read_bytes().count(b"\n") - 1 for path in folder.glob("*.jsonl"))
        return {"step": folder.name, "sent": 0, "dropped": lines, "error": error}


def main(driver: int, url: str, run: str, report: Path) -> None:
    """Send the steps that standard input names, a line of JSON each, until it ends, or the process `driver`."""
    end_with(driver)
    os.nice(NICE)
    errors = LastError()
    logging.getLogger("opentelemetry").addHandler(errors)
    sender = StepSender(OTLPSpanExporter(endpoint=f"{url.rstrip('/')}/v1/traces"), run, errors)
    waiting = SimpleQueue[dict[str, Any] | None]()
    threading.Thread(target=_read_steps, args=(waiting,), name="steps", daemon=True).start()
    with report.open("a", buffering=1) as file:
        while (step := waiting.get()) is not None:
            folder = Path(step["folder"])
            if waiting.qsize() > MOST_WAITING:
                line = sender.dropped(folder, f"more than {MOST_WAITING} steps wait to be sent")
            else:
                time.sleep(SETTLE_S)
                line = sender.send(folder)
            file.write(json.dumps(line) + "\n")
            if not step["keep"]:
                shutil.rmtree(folder, ignore_errors=True)


def _read_steps(waiting: "SimpleQueue[dict[str, Any] | None]") -> None:
    for line in sys.stdin:
        waiting.put(json.loads(line))
    waiting.put(None)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]))
