"""All spans of a profile, and one file of them for Perfetto or chrome://tracing.

The format is Chrome's trace event format: complete events (`ph: X`) with times in microseconds, and metadata events
with the names of processes and threads.
"""

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TRACE = "trace.json"
TORCH_SUFFIX = ".torch.json"
"""Suffix of a file that torch's profiler wrote of a process, next to the file of the process's spans"""


@dataclass(frozen=True, kw_only=True)
class Span:
    process: str
    """Role of the process in the run, with its pid"""
    track: str
    name: str
    begin: int
    """Begin of the span in ns of the system clock, as `end`"""
    end: int
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return (self.end - self.begin) / 1e9


def read_spans(folder: Path) -> list[Span]:
    """All spans in a folder's steps, by their begin. Of a process that was killed a broken last line is left out.

    Raises:
        ValueError: a file has another broken line; it is named.
    """
    spans = [span for path in sorted([*folder.glob("*.jsonl"), *folder.glob("step_*/*.jsonl")]) for span in _read(path)]
    return sorted(spans, key=lambda span: (span.begin, -span.end))


def _read(path: Path) -> Iterator[Span]:
    lines = path.read_text().split("\n")
    process = ""
    for number, line in enumerate(lines[:-1], 1):
        try:
            value = json.loads(line)
            if "process" in value:
                process = f"{value['process']} ({value['pid']})"
                continue
            yield Span(process=process, **value)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}:{number}: not a span of a profile: {error!r}") from error


def write_trace(folder: Path) -> Path | None:
    """Write TRACE with the spans of all processes, and with what torch's profiler recorded of them.

    Returns:
        The file; None if there are no spans.
    """
    spans = read_spans(folder)
    if not spans:
        return None
    origin = spans[0].begin
    processes = {name: number for number, name in enumerate(dict.fromkeys(span.process for span in spans), 1)}
    tracks = {key: number for number, key in enumerate(sorted({(span.process, span.track) for span in spans}), 1)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}} for name, number in processes.items()
    ]
    events += [
        {"ph": "M", "name": "thread_name", "pid": processes[process], "tid": number, "args": {"name": track}}
        for (process, track), number in tracks.items()
    ]
    events += [
        {
            "ph": "X",
            "name": span.name,
            "pid": processes[span.process],
            "tid": tracks[span.process, span.track],
            "ts": (span.begin - origin) / 1e3,
            "dur": (span.end - span.begin) / 1e3,
            "args": span.details,
        }
        for span in spans
    ]
    for path in sorted(folder.glob(f"*{TORCH_SUFFIX}*")):
        events += _torch_events(path, origin)
    file = folder / TRACE
    file.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return file


def _torch_events(path: Path, origin: int) -> list[dict[str, Any]]:
    """Events of torch's profiler on the spans' clock, as processes of their own."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    trace = json.loads(text)
    shift = (trace["baseTimeNanoseconds"] - origin) / 1e3
    name = path.name.split(TORCH_SUFFIX)[0]
    events = []
    for event in trace["traceEvents"]:
        moved = {**event, "pid": f"{name}: {event['pid']}"}
        if "ts" in event:
            moved["ts"] = event["ts"] + shift
        events.append(moved)
    return events


def within(spans: Sequence[Span], begin: int, end: int) -> list[Span]:
    """The parts of spans that lie in a period."""
    return [
        Span(**{**vars(span), "begin": max(span.begin, begin), "end": min(span.end, end)})
        for span in spans
        if span.begin < end and span.end > begin
    ]
