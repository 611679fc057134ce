"""What a run ends when it is over, by stand-ins for Ray, engines and trainer."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from slimrl.config.schema.recipe import Recipe
from slimrl.observability.run_folder import RunFolder
from slimrl.runtime import start
from slimrl.runtime.cluster.errors import RunError
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
