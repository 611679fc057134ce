"""Spans of an engine's processes for a profile of the run: what a scheduler does in each of its rounds.

1. `receive`: take requests from the tokenizer's process. An engine without work waits there.
2. `schedule`: choose the batch.
3. `prefill`, `decode`: compute it, or with the overlap scheduler hand it to the device.
4. `results`: read its tokens and hand them on.
"""

from collections.abc import Callable
from typing import Any

from slimrl.base.spans import SPANS

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"


def span_hooks() -> list[tuple[str, str, Callable[..., Any]]]:
    """Hooks as those of hooks.py; none without a profile."""
    SPANS.open_child()
    if not SPANS.is_open:
        return []
    return [
        (f"{_SCHEDULER}.ingest_requests", "around", _around("receive")),
        (f"{_SCHEDULER}.get_next_batch_to_run", "around", _around("schedule")),
        (f"{_SCHEDULER}.run_batch", "around", around_run_batch),
        (f"{_SCHEDULER}.process_batch_result", "around", _around("results")),
    ]


def _around(span: str) -> Callable[..., Any]:
    def around(original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        with SPANS(span):
            return original(*arguments, **named)

    return around


def around_run_batch(original: Callable[..., Any], scheduler: Any, batch: Any, *arguments: Any, **named: Any) -> Any:
    """Hook of Scheduler.run_batch."""
    with SPANS("prefill" if batch.forward_mode.is_extend() else "decode", requests=len(batch.reqs)):
        return original(scheduler, batch, *arguments, **named)
