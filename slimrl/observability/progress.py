"""Progress output: a live line per phase and a summary row per step; plain lines without a terminal.

On a terminal a second live line counts the steps of the run and estimates the remaining time. A run's folder has the
same for other terminals (now_file.py).
"""

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from slimrl.observability.now_file import Doing, Now, now_file
from slimrl.observability.terminal import plain_console

PLAIN_INTERVAL_S = 10.0
"""Seconds between two lines of a phase's progress where there is no terminal."""

ESTIMATE_PERIOD_S = 3600.0
"""Length of the last period of steps from which the remaining time is estimated, in seconds."""

HEADER_EVERY_ROWS = 20

COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("reward", "reward/mean", "{:.3f}"),
    ("clip", "policy/clip_fraction", "{:.3f}"),
    ("explained", "critic/explained_variance", "{:.2f}"),
    ("mismatch", "mismatch/logprob_abs_mean", "{:.1e}"),
    ("expert load", "moe/expert_load_worst", "{:.1f}"),
    ("dead experts", "moe/dead_experts", "{:.0f}"),
    ("loss", "sft/loss", "{:.4f}"),
    ("tok/s", "rollout/tokens_per_s", "{:.0f}"),
    ("rollout", "time/rollout_s", "{:.1f}s"),
    ("logprobs", "time/logprobs_s", "{:.1f}s"),
    ("train", "time/train_s", "{:.1f}s"),
    ("drain", "time/drain_s", "{:.1f}s"),
    ("eval_wait", "time/eval_wait_s", "{:.1f}s"),
    ("resync", "time/resync_s", "{:.1f}s"),
    ("total", "time/step_s", "{:.1f}s"),
)
"""Title, metric and format of the columns of a summary row after the step's number; one without a value is left out."""


class Phase:
    """A running phase; `advance` and `update` may be called from any thread."""

    def __init__(self, progress: "Progress", name: str, total: int | None, unit: str) -> None:
        self._progress, self._name, self._total, self._unit = progress, name, total, unit
        self._done, self._since = 0, time.time()
        self._lock = threading.Lock()
        self._said_at = time.monotonic()
        self._task = None if progress.live is None else progress.live.add_task(name, total=total, count=self._count())

    def advance(self, count: int = 1) -> None:
        with self._lock:
            self._done += count
            self._show()

    def update(self, done: int, total: int | None = None) -> None:
        """Set the count, and the total once it is known."""
        with self._lock:
            self._done = done
            self._total = self._total if total is None else total
            self._show()

    def _show(self) -> None:
        live = self._progress.live
        if live is not None and self._task is not None:
            live.update(self._task, completed=self._done, total=self._total, count=self._count())
        elif time.monotonic() - self._said_at >= PLAIN_INTERVAL_S:
            self._said_at = time.monotonic()
            self._progress.say(f"{self._name} {self._count()}".strip())

    @property
    def doing(self) -> Doing:
        return Doing(name=self._name, since=self._since, done=self._done, total=self._total, unit=self._unit)

    def _count(self) -> str:
        return f"{self._done}/{self._total} {self._unit}" if self._total else ""

    def end(self) -> None:
        """Remove the live line."""
        if self._progress.live is not None and self._task is not None:
            self._progress.live.remove_task(self._task)


class _TimeLeft(ProgressColumn):
    """`0:04:10 left`, once it can be estimated."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        seconds = task.time_remaining
        return Text("" if seconds is None else f"{timedelta(seconds=int(seconds))} left")


class Progress:
    """What `slimrl` prints while it runs; used as a context manager."""

    def __init__(self, total_steps: int, console: Console | None = None) -> None:
        self.total_steps = total_steps
        self._console = console or plain_console()
        self._rows = 0
        self._titles: list[str] = []
        self._steps: TaskID | None = None
        self._step: int | None = None
        self._running: list[Phase | Doing] = []
        """Phases that run, in the order in which they began"""
        self.engines: Callable[[], dict[str, dict[str, float]]] = dict
        """Counts of the engines of each role, by name; called in another thread"""
        self.live: RichProgress | None = None
        if self._console.is_terminal:
            self.live = RichProgress(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=30),
                TextColumn("{task.fields[count]}"),
                TimeElapsedColumn(),
                _TimeLeft(),
                console=self._console,
                transient=True,
                speed_estimate_period=ESTIMATE_PERIOD_S,
            )

    def __enter__(self) -> Self:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live is not None:
            self.live.stop()

    @contextmanager
    def noted_in(self, file: Path) -> Iterator[None]:
        """Keep what is done at present in a file during the block; see `now_file`."""
        with now_file(file, self._now):
            yield

    def _now(self) -> Now:
        doing = [one if isinstance(one, Doing) else one.doing for one in list(self._running)]
        return Now(step=self._step, steps=self.total_steps, doing=doing, engines=self.engines())

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Note that a step runs during the block."""
        self._step = number
        try:
            yield
        finally:
            self._step = None

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Note a part of a step, whose phases the terminal shows while they last; the terminal shows no part."""
        doing = Doing(name=name, since=time.time())
        self._running.append(doing)
        try:
            yield
        finally:
            self._running.remove(doing)

    @contextmanager
    def phase(self, name: str, total: int | None, unit: str) -> Iterator[Phase]:
        """Show a phase, such as `rollout 12/256 trajectories`, while the block runs; no `total`: nothing is counted."""
        phase = Phase(self, name, total, unit)
        self._running.append(phase)
        try:
            yield phase
        finally:
            self._running.remove(phase)
            phase.end()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Show a phase in which nothing can be counted; one line without a terminal."""
        if self.live is None:
            self.say(name)
        with self.phase(name, None, ""):
            yield

    def say(self, text: str) -> None:
        """Print a line of literal text above the live ones."""
        self._console.print(text, markup=False, highlight=False, emoji=False)

    def summary(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the row of a step, evaluations last, under a header that is repeated every 20 rows."""
        cells = [("step", f"{step}/{self.total_steps}", 9)]
        cells += [
            (title, form.format(metrics[name]), max(8, len(title))) for title, name, form in COLUMNS if name in metrics
        ]
        titles = [title for title, _, _ in cells]
        if self._rows % HEADER_EVERY_ROWS == 0 or titles != self._titles:
            self.say("  ".join(f"{title:>{width}}" for title, _, width in cells))
        row = "  ".join(f"{text:>{width}}" for _, text, width in cells)
        self.say("  ".join([row, *_evaluations(metrics)]))
        self._rows, self._titles = self._rows + 1, titles
        self._count_step(step)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the evaluation of an earlier step."""
        self.say("  ".join([f"evaluation of step {step}:", *_evaluations(metrics)]))

    def _count_step(self, step: int) -> None:
        """Update the live line of the run, which exists from the first row to that of the last step."""
        if self.live is None:
            return
        if self._steps is None:
            self._steps = self.live.add_task("steps", total=self.total_steps, completed=step, count="")
        self.live.update(self._steps, completed=step, count=f"{step}/{self.total_steps}")
        if step >= self.total_steps:
            self.live.remove_task(self._steps)
            self._steps = None


def _evaluations(metrics: Mapping[str, float]) -> list[str]:
    """Name and mean reward of each evaluation set, as text."""
    return [
        f"{name.split('/')[1]} {value:.3f}"
        for name, value in metrics.items()
        if re.fullmatch("eval/[^/]+/reward_mean", name)
    ]
