"""A checkpoint that is written beside the training: it has the moment of its begin, and is whole or not there."""

from pathlib import Path

import pytest

from slimrl.base.errors import NotWritten, StageError, TrainerLost
from slimrl.checkpoints.digests import file_digests
from slimrl.config.schema.run import CheckpointConfig
from slimrl.runtime.checkpoint_writer import CheckpointWriter
from slimrl.runtime.checks.checkpoint_check import newest_checkpoint
from slimrl.runtime.state import CheckpointFolder, RunState


class Ranks:
    """Write the weights that they have at the beginning, some time later."""

    def __init__(self) -> None:
        self.weights, self.written = "0", False
        self.error: Exception | None = None

    def begin_checkpoint(self, directory: Path) -> None:
        self.directory, self.staged, self.written = directory, self.weights, False

    def has_written(self, directory: Path) -> bool:
        return self.written

    def finish_checkpoint(self, directory: Path):
        if self.error is not None:
            raise self.error
        self.directory.mkdir()
        (self.directory / "weights").write_text(self.staged)
        return file_digests(self.directory, ["weights"])


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


class Begun:
    def __init__(self, path: Path, ranks: Ranks, **settings: int) -> None:
        self.folder, self.completed, self.state = CheckpointFolder(path), [], RunState(step=4)
        self.writer = CheckpointWriter(self.folder, CheckpointConfig(**settings), self.completed.append)
        self.writer.begin(self.state, {"trainer": ranks})


def test_the_run_goes_on_and_the_checkpoint_has_the_moment_of_its_begin(tmp_path: Path, ranks: Ranks):
    begun = Begun(tmp_path, ranks)
    ranks.weights, begun.state.step = "1", 5
    begun.state.past_versions["3"] = [1.0, 0.0]
    begun.writer.look()
    assert begun.folder.complete() == []
    assert (begun.writer.holds(4), begun.writer.holds(5)) == (True, False)
    ranks.written = True
    begun.writer.look()
    found = newest_checkpoint(begun.folder, contents=True)
    assert found is not None
    assert (found.path.name, found.state) == ("step_000004", RunState(step=4))
    assert (found.path / "trainer" / "weights").read_text() == "0"
    assert begun.completed == [4]
    begun.writer.finish()
    assert begun.completed == [4]


def test_the_next_one_waits_for_the_one_before_and_old_ones_go_when_it_is_whole(tmp_path: Path, ranks: Ranks):
    begun = Begun(tmp_path, ranks, keep=1)
    begun.state.step = 5
    begun.writer.begin(begun.state, {"trainer": ranks})
    assert [path.name for path in begun.folder.complete()] == ["step_000004"]
    begun.writer.finish()
    assert [path.name for path in begun.folder.complete()] == ["step_000005"]
    assert begun.completed == [4, 5]


def test_checkpoints_of_chosen_steps_are_kept_beside_the_newest(tmp_path: Path, ranks: Ranks):
    begun = Begun(tmp_path, ranks, keep=1, keep_every_steps=4)
    for step in (6, 8, 10, 11):
        begun.state.step = step
        begun.writer.begin(begun.state, {"trainer": ranks})
    begun.writer.finish()
    assert [path.name for path in begun.folder.complete()] == ["step_000004", "step_000008", "step_000011"]


def test_what_could_not_be_written_leaves_nothing_and_ends_the_run(tmp_path: Path, ranks: Ranks):
    begun = Begun(tmp_path, ranks)
    ranks.error = StageError("trainer 0: finish_checkpoint: RuntimeError: No space left on device")
    with pytest.raises(StageError, match=r"the checkpoint of step 4 could not be written: .*No space left"):
        begun.writer.finish()
    assert list(tmp_path.iterdir()) == []
    assert not begun.writer.holds(4)
    # Nothing is left that another attempt would wait for.
    begun.writer.finish()


def test_a_part_that_could_not_be_written_leaves_no_other_one_under_way(tmp_path: Path, ranks: Ranks):
    critic = Ranks()
    writer = CheckpointWriter(CheckpointFolder(tmp_path), CheckpointConfig(), lambda step: pytest.fail("not complete"))
    writer.begin(RunState(step=4), {"trainer": ranks, "critic": critic})
    ranks.error, critic.error = NotWritten("trainer 0: No space left"), NotWritten("critic 0: No space left")
    finished = []
    critic.finish_checkpoint = lambda directory: finished.append(directory.name) or Ranks.finish_checkpoint(critic, "")
    with pytest.raises(StageError, match="could not be written: trainer 0: No space left"):
        writer.finish()
    assert finished == ["critic"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [NotWritten("critic 0: No space left"), OSError("No space left")])
def test_a_part_that_could_not_begin_leaves_no_other_one_under_way(tmp_path: Path, ranks: Ranks, error: Exception):
    class Full(Ranks):
        def begin_checkpoint(self, directory: Path) -> None:
            raise error

    writer = CheckpointWriter(CheckpointFolder(tmp_path), CheckpointConfig(), lambda step: pytest.fail("not complete"))
    finished = []
    # What it says of itself then is a consequence, or no more than a second cause.
    ranks.error = NotWritten("trainer 0: No space left")
    ranks.finish_checkpoint = lambda directory: finished.append(directory.name) or Ranks.finish_checkpoint(ranks, "")
    with pytest.raises(StageError, match=f"the checkpoint of step 4 could not be written: {error}"):
        writer.begin(RunState(step=4), {"trainer": ranks, "critic": Full()})
    assert finished == ["trainer"]
    assert list(tmp_path.iterdir()) == []
    assert not writer.holds(4)


def test_what_a_lost_trainer_was_writing_goes_when_its_ranks_have_ended(tmp_path: Path, ranks: Ranks):
    begun = Begun(tmp_path, ranks)
    ranks.error = TrainerLost("trainer 0: its process died")
    with pytest.raises(TrainerLost, match=r"^trainer 0: its process died$"):
        begun.writer.finish()
    assert [path.name for path in tmp_path.iterdir()] == [".partial_step_000004"]
    begun.writer.abandon()
    assert list(tmp_path.iterdir()) == []
