"""What a run leaves at its end, in an order that a kill cannot turn into a complete run that lacks something."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from slimrl.config.schema import Recipe
from slimrl.observability.run_folder import RunFolder
from slimrl.runtime import train_run
from slimrl.runtime.state import RunState
from slimrl.runtime.train_run import TrainRun


def test_the_curve_is_there_before_the_model_that_makes_a_run_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = RunFolder(tmp_path)
    monkeypatch.setattr(train_run, "write_curve", lambda metrics, curve, title: curve.touch())
    curves = []
    run = object.__new__(TrainRun)
    run.recipe, run.state, run._folder = Recipe(steps=1), RunState(step=1), folder
    run.recipe.run.name = "demo"
    run._checkpoints = SimpleNamespace(holds=lambda step: True)
    run._memory = SimpleNamespace(enter=lambda stage: None)
    run._trainers = SimpleNamespace(export_hf=lambda path: curves.append(folder.curve.is_file()))
    run._progress = SimpleNamespace(say=lambda text: None)
    run.finish()
    assert curves == [True]
