"""Breakdown of a profiled step: the driver's phases, which add up to the step, and what each process did.

A span's own time is what no span inside it on the same track takes. The numbered tracks of things that go on at once,
such as episodes, are summed, so that they can have more own time than the step is long.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from slimrl.observability.profiling.nesting import nested
from slimrl.observability.profiling.recorder import STEP
from slimrl.observability.profiling.trace import Span, within

BETWEEN = "between phases"


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """The breakdown of a recorded step, in seconds."""

    number: int
    seconds: float
    phases: dict[str, float]
    """Seconds of the driver's phases, with BETWEEN; their sum is `seconds`"""
    processes: dict[str, dict[str, tuple[float, int]]]
    """Own seconds and number of spans, by process (with its thread where it has spans of several) and name of the
    span"""
    tracks: dict[str, int]
    """Number of tracks that each of `processes` sums up: more than one only if they are numbered"""


def step_profiles(spans: Sequence[Span]) -> list[StepProfile]:
    """The breakdowns of all recorded steps."""
    profiles = []
    for step in (span for span in spans if span.name == STEP):
        inside = within([span for span in spans if span is not step], step.begin, step.end)
        own = [span for span in inside if (span.process, span.track) == (step.process, step.track)]
        tables = _tables(inside)
        profiles.append(
            StepProfile(
                number=step.details["number"],
                seconds=step.seconds,
                phases=_phases(step, own),
                processes={name: own_times(of_table) for name, of_table in tables.items()},
                tracks={name: len({span.track for span in of_table}) for name, of_table in tables.items()},
            )
        )
    return profiles


def _tables(spans: Sequence[Span]) -> dict[str, list[Span]]:
    """The spans of each process and kind of track, by the name of their table."""
    groups: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in spans:
        groups[span.process, _kind(span.track)].append(span)
    kinds = Counter(process for process, _ in groups)
    return {
        f"{process}, {kind}" if kinds[process] > 1 else process: of_table
        for (process, kind), of_table in groups.items()
    }


def _kind(track: str) -> str:
    """Common name of numbered tracks (Spans.lane); the own name of other tracks."""
    kind, _, number = track.rpartition(" ")
    return kind if kind and number.isdigit() else track


def _phases(step: Span, spans: Sequence[Span]) -> dict[str, float]:
    """Seconds of the outermost spans of the driver's own track."""
    phases: dict[str, float] = defaultdict(float)
    end = step.begin
    for span in spans:
        if span.begin >= end:
            phases[span.name] += span.seconds
            end = span.end
    return {**phases, BETWEEN: step.seconds - sum(phases.values())}


def own_times(spans: Sequence[Span]) -> dict[str, tuple[float, int]]:
    """Own seconds and number of the spans of each name, the longest first."""
    seconds: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for span, outer in nested(spans):
        if outer is not None:
            # Where spans overlap without one inside the other, only the common part is taken off.
            seconds[outer.name] -= (min(span.end, outer.end) - span.begin) / 1e9
        seconds[span.name] += span.seconds
        counts[span.name] += 1
    return {name: (seconds[name], counts[name]) for name in sorted(seconds, key=lambda name: -seconds[name])}
