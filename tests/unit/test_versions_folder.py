"""Two runs of one name do not write their versions into one folder."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from slimrl.base.folder_lock import folder_lock
from slimrl.checkpoints.versions.directory import VersionDirectory
from slimrl.config.load import LoadedRecipe, load_recipe
from slimrl.observability.progress import Progress
from slimrl.runtime import start
from slimrl.runtime import versions_folder as versions_folder_module
from slimrl.runtime.versions_folder import versions_folder

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny_moe" / "gspo_calculator.yaml"


@pytest.fixture
def versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of the versions of runs that are called demo."""
    monkeypatch.setattr(start, "collect_provenance", lambda *about: {})
    monkeypatch.setattr(start, "log_to_file", lambda *about, **how: None)
    return tmp_path / "shared" / "demo"


def recipe(versions: Path, runs: str, transport: str = "disk") -> LoadedRecipe:
    folders = [f"run.dir={versions.parents[1] / runs}", f"resync.dir={versions.parent}"]
    return load_recipe(RECIPE, [*folders, "run.name=demo", f"resync.transport={transport}"])


@pytest.mark.parametrize("transport", ["disk", "delta"])
def test_the_second_run_of_a_name_is_refused_and_the_first_one_s_versions_stay(versions: Path, transport: str):
    first, second = recipe(versions, "first", transport), recipe(versions, "second", transport)
    with start.open_run(first, Progress(0)) as run:
        directory = VersionDirectory(versions)
        directory.publish(directory.begin(3), 3)
        with pytest.raises(ValueError, match="in use by process"), start.open_run(second, Progress(0)):
            raise AssertionError
    # Ended or not: its versions are its own as long as its folder is there.
    said = rf"command line: resync.dir: {versions} holds the versions of the run in {run.path}, .*Give another run.name"
    with pytest.raises(ValueError, match=said), start.open_run(second, Progress(0)):
        raise AssertionError
    assert not (versions.parents[1] / "second").exists()
    assert VersionDirectory(versions).versions() == [3]


def test_the_same_run_takes_its_versions_up_again_and_another_one_those_of_a_run_that_is_gone(versions: Path):
    first, second = recipe(versions, "first"), recipe(versions, "second")
    for how in ({}, {"resume": True}, {"overwrite": True}, {"resume": None}):
        with start.open_run(first, Progress(0), **how):
            pass
    (versions.parents[1] / "first").rename(versions.parents[1] / "removed")
    with start.open_run(second, Progress(0)):
        pass
    with (
        pytest.raises(ValueError, match=r"holds the versions of the run in .*second"),
        versions_folder(first, wait_s=0, say=print),
    ):
        raise AssertionError


def test_other_transports_and_versions_in_the_run_s_own_folder_need_no_owner(versions: Path):
    for runs, transport in (("first", "ipc"), ("second", "p2p")):
        with start.open_run(recipe(versions, runs, transport), Progress(0)):
            assert not versions.exists()
    own = load_recipe(RECIPE, [f"run.dir={versions.parents[1]}", "run.name=demo", "resync.transport=disk"])
    with start.open_run(own, Progress(0)) as run, folder_lock(run.path / "logs"):
        assert not versions.exists()


def test_a_run_waits_for_its_versions_folder_as_long_as_it_is_told(versions: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []

    def lock(folder, **how):
        asked.append((folder, how))
        return nullcontext()

    monkeypatch.setattr(versions_folder_module, "folder_lock", lock)
    with versions_folder(recipe(versions, "first"), wait_s=7.0, say=print):
        assert asked == [(versions, {"wait_s": 7.0, "say": print})]
