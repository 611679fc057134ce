"""How often a trainer is started anew, and from where."""

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from slimrl.base.errors import NotFinite, NotLoaded, RunError, StageError, TrainerLost
from slimrl.config.schema.run import RunConfig
from slimrl.runtime.left_out import LeftOut
from slimrl.runtime.state import CheckpointFolder, RunState
from slimrl.runtime.trainer_restarts import TrainerRestarts

NOTHING = LeftOut(Path("of a run that has not gone back"), lambda items: None)


class Trial:
    """A run whose loop ends at each of `losses` (seconds on the clock), and whose starts may fail."""

    def __init__(self, losses: list[float], failing_starts: int = 0, left_out=None, faults=(), **limits: float) -> None:
        """
        Args:
            left_out: what the run leaves out if it may go back.
            faults: what is at fault each time that the loop ends for numbers that are not finite, before `losses`.
        """
        self.faults, self.completed = list(faults), 0
        self.losses, self.failing_starts = list(losses), failing_starts
        self.now, self.begun, self.ended, self.said = 0.0, [], 0, []
        self.checkpoint, self.state = Path("step_000003"), RunState(step=3)
        self.copies: list[int] = []
        """Steps of copies in memory, which cannot be loaded"""
        self.loads = True
        """Whether the checkpoint on the disk can be loaded"""
        self.restarts = TrainerRestarts(
            RunConfig(name="run", **limits),
            self.newest,
            SimpleNamespace(say=self.said.append, stage=self.stage),
            lambda: self.now,
            left_out=left_out or NOTHING,
            rewinds=left_out is not None,
        )

    @contextmanager
    def stage(self, name: str):
        yield

    def newest(self) -> tuple[Path, RunState]:
        if self.copies:
            return Path(f"memory/{self.copies[-1]}"), RunState(step=self.copies[-1])
        return self.checkpoint, self.state

    def begin(self, checkpoint, state):
        self.begun.append((checkpoint, state.step))
        self.present = state
        return self, self.loop

    def complete_checkpoint(self, *, copies: bool = False) -> None:
        # The copy in memory too, for the run goes on from there.
        assert copies
        self.completed += 1

    def loop(self) -> None:
        if self.faults:
            self.present.suspects, self.present.skipped_in_a_row = self.faults.pop(0), 2
            self.present.critic_skipped_in_a_row = 1
            raise NotFinite("2 optimizer updates in a row")
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
        if self.copies or not self.loads:
            raise NotLoaded("trainer 0: load_checkpoint: OSError: No space left on device")

    def forget_copy(self, checkpoint) -> bool:
        return bool(self.copies) and checkpoint == Path(f"memory/{self.copies.pop()}")

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


def test_copies_in_memory_that_cannot_be_loaded_leave_the_checkpoint_on_the_disk():
    trial = Trial([10.0], max_restarts=1)
    trial.copies = [4, 5]
    assert trial.go() is trial.state
    assert trial.begun[1:] == [(trial.checkpoint, 3)]
    assert trial.ended == 3
    no_space = "warning: trainer 0: load_checkpoint: OSError: No space left on device; the copy of step"
    assert trial.said[1:3] == [f"{no_space} 5 in memory is not used", f"{no_space} 4 in memory is not used"]
    trial = Trial([10.0])
    trial.loads = False
    with pytest.raises(NotLoaded, match=r"No space left on device$"):
        trial.go()


def test_without_restarts_the_cause_is_raised_as_it_is():
    with pytest.raises(TrainerLost, match=r"^trainer 1: its process died$"):
        Trial([10.0], max_restarts=0).go()


def test_a_run_that_may_goes_back_once_for_what_is_not_finite_and_leaves_it_out(tmp_path):
    file = tmp_path / "left_out.json"
    left_out = LeftOut(file, bool)
    trial = Trial([10.0], faults=[["p:7", "p:1"]], left_out=left_out, max_restarts=1)
    # The checkpoint is of the row of skipped updates itself.
    trial.state.skipped_in_a_row = 1
    assert trial.go() is trial.state
    # It is no restart of a trainer that died, of which one is allowed.
    assert trial.begun == [(None, 0), (trial.checkpoint, 3), (trial.checkpoint, 3)]
    assert (trial.ended, trial.completed) == (2, 1)
    assert trial.said[0] == (
        "warning: 2 optimizer updates in a row; the run goes back and leaves out 2 from now on: p:7, p:1"
    )
    assert left_out.items == LeftOut(file, bool).items == {"p:1", "p:7"}
    assert (trial.state.skipped_in_a_row, trial.state.critic_skipped_in_a_row, trial.state.suspects) == (0, 0, [])


def test_a_run_ends_the_second_time_also_where_it_was_resumed_in_between(tmp_path):
    file = tmp_path / "left_out.json"
    trial = Trial([], faults=[["p:7"], ["p:8"]], left_out=LeftOut(file, bool))
    with pytest.raises(RunError, match=r"in a row\. The run had gone back before, which stop\.rewind_not_finite"):
        trial.go()
    assert len(trial.begun) == 2
    resumed = Trial([], faults=[["p:8"]], left_out=LeftOut(file, bool))
    with pytest.raises(RunError, match="had gone back before"):
        resumed.go()
    assert LeftOut(file, bool).items == {"p:7"}


def test_without_leave_what_is_not_finite_ends_the_run_and_weights_leave_nothing_out(tmp_path):
    with pytest.raises(NotFinite, match=r"^2 optimizer updates in a row$"):
        Trial([], faults=[["p:7"]]).go()
    left_out = LeftOut(tmp_path / "left_out.json", bool)
    trial = Trial([], faults=[[]], left_out=left_out)
    trial.go()
    assert trial.said[0].endswith("and leaves out nothing")
    assert (left_out.items, LeftOut(tmp_path / "left_out.json", bool).has_gone_back) == (set(), True)


def test_the_row_of_skipped_updates_is_over_however_often_its_checkpoint_is_loaded(tmp_path):
    trial = Trial([10.0], faults=[["p:7", "p:1"]], left_out=LeftOut(tmp_path / "left_out.json", bool))
    saved = RunState(step=3, skipped_in_a_row=1, critic_skipped_in_a_row=2, suspects=["p:7"])
    trial.restarts._newest = lambda: (trial.checkpoint, replace(saved))
    assert (trial.go(), len(trial.begun)) == (RunState(step=3), 3)


def test_a_run_that_would_have_nothing_left_ends_with_its_cause_and_leaves_nothing_out(tmp_path):
    def refuse(items):
        raise ValueError(f"data.train = a.jsonl: all {len(items)} items are left out")

    file = tmp_path / "left_out.json"
    trial = Trial([], faults=[["p:7"]], left_out=LeftOut(file, refuse))
    with pytest.raises(RunError, match=r"^2 optimizer updates in a row\. .* data\.train = a\.jsonl: all 1 items are"):
        trial.go()
    assert (len(trial.begun), file.exists()) == (1, False)
    file.write_text('{"items": ["p:7"]}')
    with pytest.raises(ValueError, match=r"all 1 items are left out, by .*left_out\.json\. Remove it to leave nothing"):
        LeftOut(file, refuse)


def saved(folder: CheckpointFolder, *rows: tuple[int, list[str]]) -> CheckpointFolder:
    """A checkpoint of each step: how many updates were skipped in a row, and what was at fault in them."""
    for step, (in_a_row, suspects) in enumerate(rows, 1):
        state = RunState(step=step, skipped_in_a_row=in_a_row, suspects=suspects)
        folder.finish(folder.begin(step), state, {})
    return folder


def test_checkpoints_of_the_row_for_which_the_run_went_back_are_removed_if_one_before_it_is_there(tmp_path):
    rows = [(0, []), (1, ["other"]), (1, ["p:1"]), (2, ["p:1", "p:7"])]
    disk, memory = saved(CheckpointFolder(tmp_path / "disk"), *rows), saved(CheckpointFolder(tmp_path / "shm"), *rows)
    left_out = LeftOut(tmp_path / "left_out.json", bool)
    left_out.remove_ended_row(disk, memory)
    assert disk.steps() == memory.steps() == [1, 2, 3, 4]
    left_out.go_back(["p:1", "p:7"])
    left_out.remove_ended_row(disk, memory)
    assert disk.steps() == memory.steps() == [1, 2]


def test_checkpoints_of_that_row_are_gone_on_from_where_none_is_before_it(tmp_path):
    disk = saved(CheckpointFolder(tmp_path / "disk"), (1, ["p:1"]), (1, ["p:1"]), (1, ["p:1"]))
    memory = saved(CheckpointFolder(tmp_path / "shm"), (1, ["p:1"]))
    # It is damaged, and so none to go on from.
    (disk.named(1) / "state.json").write_text("{}")
    left_out = LeftOut(tmp_path / "left_out.json", bool)
    left_out.go_back(["p:1"])
    left_out.remove_ended_row(disk, memory)
    assert (disk.steps(), memory.steps()) == ([1, 2, 3], [1])


def test_a_damaged_file_of_what_is_left_out_is_refused(tmp_path):
    (tmp_path / "left_out.json").write_text('{"items": 3}')
    with pytest.raises(ValueError, match=r"left_out\.json is damaged: .*\. Remove it to leave nothing out\."):
        LeftOut(tmp_path / "left_out.json", bool)
