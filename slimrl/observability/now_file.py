"""What a run does at present, as a file of its folder for whoever watches it: `now.json`.

The driver's `Progress` describes it; a thread looks every INTERVAL_S and writes the file if that has changed, whole or
not at all. A run that ends removes it, whatever it ends with; one that is killed leaves it behind.
"""

import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from slimrl.base.atomic import write_whole

INTERVAL_S = 0.5
"""Seconds between two looks"""
ENDS_WITHIN_S = 5.0
"""How long the end of a run waits for a write, which may hang with its file system"""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Doing:
    """A phase that runs."""

    name: str
    since: float
    """When it began, in seconds since 1970"""
    done: int = 0
    total: int | None = None
    """None or 0: nothing is counted"""
    unit: str = ""

    @property
    def said(self) -> str:
        """Such as `rollout 12/256 trajectories`."""
        return f"{self.name} {self.done}/{self.total} {self.unit}".strip() if self.total else self.name


@dataclass(frozen=True, kw_only=True)
class Now:
    """What a run does; `step` is None between steps and before the first."""

    step: int | None
    steps: int
    doing: Sequence[Doing]
    """Phases that run, those that hold others first"""
    engines: dict[str, dict[str, float]] = field(default_factory=dict)
    """Counts of the engines of each role, by name; empty before they serve"""

    @property
    def said(self) -> str:
        """Such as `step 3 of 20, rollout 12/256 trajectories`."""
        where = [] if self.step is None else [f"step {self.step} of {self.steps}"]
        return ", ".join([*where, *(one.said for one in self.doing[-1:])]) or "between two steps"


def read_now(path: Path) -> Now | None:
    """What the file holds; None if there is none.

    Raises:
        ValueError: it is no such file; names it.
    """
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    try:
        value = json.loads(text)
        return Now(**{**value, "doing": tuple(Doing(**one) for one in value["doing"])})
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: not what a run writes: {error!r}") from error


@contextmanager
def now_file(path: Path, describe: Callable[[], Now]) -> Iterator[None]:
    """Keep the file up to date during the block, and remove it at its end. A disk that refuses it is logged once.

    Args:
        describe: called in a thread of its own.
    """
    writer = _Writer(path, describe)
    thread = threading.Thread(target=writer.run, name="slimrl-now", daemon=True)
    thread.start()
    try:
        yield
    finally:
        writer.ended.set()
        thread.join(ENDS_WITHIN_S)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s cannot be removed: %s", path, error)


class _Writer:
    def __init__(self, path: Path, describe: Callable[[], Now]) -> None:
        self._path, self._describe = path, describe
        self.ended = threading.Event()
        self._warned = False
        self._written: Now | None = None
        self.look()

    def run(self) -> None:
        while not self.ended.wait(INTERVAL_S):
            self.look()

    def look(self) -> None:
        now = self._describe()
        if now == self._written:
            return
        try:
            write_whole(self._path, json.dumps(asdict(now)) + "\n")
            self._written = now
        except OSError as error:
            if not self._warned:
                log.warning("`slimrl watch` does not see what the run does: %s", error)
            self._warned = True
