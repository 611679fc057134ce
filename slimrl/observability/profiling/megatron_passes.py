"""Spans of Megatron's forward and backward passes, one of each for a micro-batch, whatever the schedule.

On a GPU they are the times in which the passes are handed to it; torch's profiler has those of its kernels.
"""

import functools
from collections.abc import Callable
from typing import Any

from slimrl.base.spans import Spans

PASSES = {"forward_step": "forward", "backward_step": "backward"}
"""Functions of megatron.core.pipeline_parallel.schedules -> spans"""


def time_passes(spans: Spans) -> None:
    """Record spans of the passes for the rest of this process, if the run has a profile."""
    if not spans.is_open:
        return
    from megatron.core.pipeline_parallel import schedules

    for name, span in PASSES.items():
        setattr(schedules, name, _timed(getattr(schedules, name), spans, span))


def _timed(original: Callable[..., Any], spans: Spans, name: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def timed(*arguments: Any, **named: Any) -> Any:
        with spans(name):
            return original(*arguments, **named)

    return timed
