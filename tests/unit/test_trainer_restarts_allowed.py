"""How often a trainer is started anew, and from where."""

from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from slimrl.base.errors import StageError, TrainerLost
from slimrl.config.schema.run import RunConfig
from slimrl.runtime.state import RunState
from slimrl.runtime.trainer_restarts import TrainerRestarts


class Trial:
    """A run whose loop ends at each of `losses` (seconds on the clock), and whose starts may fail."""

    def __init__(self, losses: list[float], failing_starts: int = 0, **limits: float) -> None:
        self.losses, self.failing_starts = list(losses), failing_starts
        self.now, self.begun, self.ended, self.said = 0.0, [], 0, []
        self.checkpoint, self.state = Path("step_000003"), RunState(step=3)
        self.restarts = TrainerRestarts(
            RunConfig(name="run", **limits),
            lambda: (self.checkpoint, self.state),
            SimpleNamespace(say=self.said.append, stage=self.stage),
            lambda: self.now,
        )

    @contextmanager
    def stage(self, name: str):
        yield

    def begin(self, checkpoint, state):
        self.begun.append((checkpoint, state.step))
        return self, self.loop

    def loop(self) -> None:
        if self.losses:
            self.now = self.losses.pop(0)
            raise TrainerLost("trainer 1: its process died")

    def end_trainers(self) -> None:
        self.ended += 1

    def restart_trainers(self, checkpoint) -> None:
        self.now += 7.0
        if self.failing_starts:
            self.failing_starts -= 1
            raise TrainerLost("trainer 0: its process died")

    def go(self) -> RunState:
        return self.restarts.go_on(self.begin, None, RunState())


def test_each_restart_goes_on_from_the_newest_checkpoint():
    trial = Trial([10.0, 20.0])
    assert trial.go() is trial.state
    assert trial.begun == [(None, 0), (trial.checkpoint, 3), (trial.checkpoint, 3)]
    assert "the trainer has started again after 7.0 s, and goes on after step 3" in trial.said


def test_restarts_count_within_a_window():
    assert Trial([10.0, 20.0, 121.0, 131.0], max_restarts=2, restart_window_s=100.0).go().step == 3
    trial = Trial([10.0, 20.0, 109.0], max_restarts=2, restart_window_s=100.0)
    with pytest.raises(StageError, match=r"trainer 1: its process died; run.max_restarts = 2 within .* = 100 s allows"):
        trial.go()
    assert len(trial.begun) == 3


def test_a_start_that_is_lost_again_is_a_restart_too():
    trial = Trial([10.0], failing_starts=2)
    trial.go()
    assert trial.ended == 3
    with pytest.raises(StageError, match=r"^trainer 0: its process died; run.max_restarts = 2"):
        Trial([10.0], failing_starts=2, max_restarts=2).go()


def test_without_restarts_the_cause_is_raised_as_it_is():
    with pytest.raises(TrainerLost, match=r"^trainer 1: its process died$"):
        Trial([10.0], max_restarts=0).go()
