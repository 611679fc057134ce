"""Records steps of a run: the driver's side of a profile, and of spans that are sent (`tracking.opentelemetry`)."""

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from slimrl.base.spans import LOOK_S, PROFILED, RECORDING, SPANS
from slimrl.observability.profiling.span_sender import SpanSender
from slimrl.observability.profiling.trace import write_trace

STEP = "whole step"
"""Name of the span of a whole step"""
UNKEPT = "unkept"
"""Name of the folder of steps that are sent and belong to no profile; it ends with the run."""


def parse_steps(text: str) -> frozenset[int]:
    """Steps such as `3`, `3-5` or `2,7`.

    Raises:
        ValueError: says what is expected.
    """
    steps: set[int] = set()
    for part in text.split(","):
        if (match := re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)) is None:
            raise ValueError(f"--profile {text}: give steps such as 3, 3-5 or 2,7.")
        first, last = int(match[1]), int(match[2] or match[1])
        if first < 1 or last < first:
            raise ValueError(f"--profile {text}: steps count from 1, and the last of a range is not before its first.")
        steps |= set(range(first, last + 1))
    return frozenset(steps)


@dataclass(frozen=True, kw_only=True)
class Profiled:
    """Steps of a run to record, and how."""

    steps: frozenset[int]
    torch: bool = False
    """Whether to record also what torch does in the trainer's ranks"""


def check_profiled(profiled: Profiled | None, steps: int) -> None:
    """Raises ValueError if the run has not all of the steps."""
    if profiled is not None and (last := max(profiled.steps)) > steps:
        raise ValueError(f"--profile: there is no step {last}; the run has {steps}.")


class TorchProfiled(Protocol):
    """Processes that torch's profiler can record."""

    def begin_torch_profile(self) -> None: ...

    def end_torch_profile(self, folder: Path) -> None:
        """Writes a file for each process (trace.TORCH_SUFFIX)."""


class Recorder:
    """Recorder of one run's spans."""

    def __init__(self, folder: Path, profiled: Profiled | None, sender: SpanSender | None = None) -> None:
        """Make the folder in which the run's processes look for it, so before they start: anew for a profile.

        Args:
            sender: gets every step.
        """
        self._folder, self._sender = folder.absolute(), sender
        self._steps, self._torch = (
            (profiled.steps, profiled.torch) if profiled is not None else (frozenset[int](), False)
        )
        shutil.rmtree(folder / UNKEPT if profiled is None else folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PROFILED).touch()
        SPANS.open(self._folder, "driver")

    @contextmanager
    def step(self, number: int, trainers: TorchProfiled) -> Iterator[None]:
        """Record the block if this step is one of the profile, or all are sent."""
        keep = number in self._steps
        if not keep and self._sender is None:
            yield
            return
        if torch := keep and self._torch:
            trainers.begin_torch_profile()
        name = f"step_{number:06d}" if keep else f"{UNKEPT}/step_{number:06d}"
        (self._folder / name).mkdir(parents=True, exist_ok=True)
        flag, new = self._folder / RECORDING, self._folder / f"{RECORDING}.new"
        new.write_text(name)
        os.replace(new, flag)
        # Every process has looked before the step begins.
        time.sleep(2 * LOOK_S)
        try:
            with SPANS(STEP, number=number):
                yield
        finally:
            flag.unlink()
            if self._sender is not None:
                self._sender.send(self._folder / name, keep=keep)
        if torch:
            trainers.end_torch_profile(self._folder)

    def finish(self) -> Path | None:
        """End the sender, and write the trace of a profile; None if there is nothing in it."""
        if self._sender is not None:
            self._sender.close()
        shutil.rmtree(self._folder / UNKEPT, ignore_errors=True)
        if self._steps:
            return write_trace(self._folder)
        (self._folder / PROFILED).unlink()
        # It may hold the profile of an earlier attempt.
        with suppress(OSError):
            self._folder.rmdir()
        return None
