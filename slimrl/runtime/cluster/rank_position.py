"""What a rank says of itself beside the call that it is in: how far it is, and where its threads stand."""

import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from slimrl.runtime.cluster import actors

INNERMOST = 4
"""Frames of the call that a message names"""


@dataclass(frozen=True)
class RankProgress:
    done: int
    total: int
    """Micro-batches, buckets or tensors of the present call"""
    count: int
    """Grows with each of them, over all calls"""


@dataclass(frozen=True)
class RankPosition:
    text: str
    """The innermost frames of the present call, in a line"""
    stacks: str
    """Stacks of all threads, and what torch has recorded of its last collectives"""


def position(progress: RankProgress) -> RankPosition:
    """Where this process stands."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = [
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    ]
    call = next((frames for frame in sys._current_frames().values() if (frames := _of_call(frame))), [])
    inner = " < ".join(f"{frame.name} ({Path(frame.filename).name}:{frame.lineno})" for frame in call[:INNERMOST])
    text = f"{progress.done} of {progress.total} done, in {inner or 'no call'}"
    return RankPosition(text, "\n".join([*stacks, _collectives()]))


def _of_call(frame: FrameType) -> list[traceback.FrameSummary]:
    """The frames of a thread that runs the actor's call, innermost first; none of another thread."""
    walked = list(traceback.walk_stack(frame))
    depths = [depth for depth, (step, _) in enumerate(walked) if step.f_code is actors.run.__code__]
    return list(traceback.StackSummary.extract(iter(walked[: depths[0]]))) if depths else []


def _collectives() -> str:
    """The last collectives as torch's flight recorder has them, as JSON; it records those of NCCL."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available():
        return ""
    from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]

    return f"collectives: {_dump_fr_trace_json().decode(errors='replace')}"
