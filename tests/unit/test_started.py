"""What a run ends when it is over, by stand-ins for Ray, engines and trainer."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from slimrl.base.errors import RunError
from slimrl.config.schema.recipe import Recipe
from slimrl.data.trajectory import Status, Trajectory
from slimrl.observability.run_folder import RunFolder
from slimrl.rollout.errors import TooManyFailed
from slimrl.runtime import start
from slimrl.runtime.cluster.processes import Processes


class Progress:
    def stage(self, name: str):
        return nullcontext()


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was ended, in order."""
    noted: list[str] = []
    family = SimpleNamespace(note=lambda: None, end=lambda: noted.append("processes that are left"))
    monkeypatch.setattr(start, "ChildProcesses", lambda: family)
    monkeypatch.setattr(start, "close_comparers", lambda: noted.append("comparers"))
    monkeypatch.setattr(start, "clean_stale_segments", list)
    monkeypatch.setattr(start, "most_slots", lambda *_, **__: 1)
    monkeypatch.setattr(start, "ray_cluster", lambda *_, **__: nullcontext())
    monkeypatch.setattr(start, "cluster_nodes", lambda **_: ([], "CPU"))
    monkeypatch.setattr(start, "place_what_fits", lambda *_, **__: None)
    monkeypatch.setattr(start, "Reservation", lambda *_: None)
    monkeypatch.setattr(start, "start_processes", lambda *_, **__: Processes(engines=None, trainers=None))
    return noted


def failed(number: int, cause: str) -> Trajectory:
    messages = [{"role": "user", "content": f"question {number}"}]
    return Trajectory(
        group_id="g",
        trajectory_id=f"g/{number}",
        segments=[],
        status=Status.failed,
        messages=messages,
        metadata={"error": cause},
    )


def test_conversations_that_failed_are_there_to_read_one_of_each_cause_first(tmp_path: Path, ended: list[str]):
    recipe, folder = Recipe(), RunFolder(tmp_path)
    folder.logs.mkdir(parents=True)
    causes = ["a", "a", "b", "a", "c"]
    failure = TooManyFailed("rollout: 5 of 5 failed: a; b; c", [failed(*each) for each in enumerate(causes)])
    for limit, shown in ((4, ["g/0", "g/2", "g/4", "g/1"]), (2, ["g/0", "g/2"])):
        recipe.tracking.trajectories_per_step = limit
        with pytest.raises(RunError) as raised, start.started(recipe, folder, Progress(), total_updates=None):
            raise failure
        assert str(raised.value) == f"{failure}\nconversations that failed: {folder.failed_file}"
        rows = [json.loads(line) for line in folder.failed_file.read_text().splitlines()]
        assert [row["trajectory_id"] for row in rows] == shown
        assert [row["messages"][0]["content"] for row in rows] == [f"question {one[-1]}" for one in shown]
        folder.failed_file.unlink()
    recipe.tracking.trajectories_per_step = 0
    with (
        pytest.raises(TooManyFailed, match=r"c$"),
        start.started(recipe, folder, Progress(), total_updates=None),
    ):
        raise failure
    assert not folder.failed_file.exists()


@pytest.mark.parametrize("failure", [None, RunError("no"), KeyboardInterrupt()])
def test_processes_that_compare_answers_end_with_the_run_however_it_ends(tmp_path: Path, ended: list[str], failure):
    folder = RunFolder(tmp_path)
    folder.logs.mkdir(parents=True)
    outcome = nullcontext() if failure is None else pytest.raises(type(failure))
    with outcome, start.started(Recipe(), folder, Progress(), with_engines=False, total_updates=None):
        if failure is not None:
            raise failure
    # Told to end before what is left is waited for.
    assert ended == ["comparers", "processes that are left"]
