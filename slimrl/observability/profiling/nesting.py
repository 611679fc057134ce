"""Which span encloses which: those of one track, of which each begins inside the one around it."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from slimrl.observability.profiling.trace import Span


def nested(spans: Sequence[Span]) -> Iterator[tuple[Span, Span | None]]:
    """Each span with the innermost one on its track that it begins in; None for an outermost one. By their begin, then
    the longer first."""
    opened: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        outer = opened[span.process, span.track]
        while outer and outer[-1].end <= span.begin:
            outer.pop()
        yield span, outer[-1] if outer else None
        outer.append(span)
