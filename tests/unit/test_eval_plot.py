"""The figure of evaluations over what they cost."""

import json

import pytest
from matplotlib import axes

from slimrl.evaluation.folder import EvalFolder
from slimrl.evaluation.plot import write_plot


def evaluation(folder, mean: float, tokens: float) -> EvalFolder:
    folder.mkdir()
    one = {"accuracy": mean, "intervals": {"accuracy": [mean - 0.1, mean + 0.2]}, "tokens_mean": tokens}
    found = EvalFolder(folder)
    found.summary.write_text(json.dumps({"checkpoint": "m", "sets": {"heldout": one}}))
    return found


def test_each_evaluation_is_a_point_with_its_interval_over_its_tokens(tmp_path, monkeypatch):
    drawn, named = [], []
    errorbar = axes.Axes.errorbar

    def record(self, *given, **how):
        drawn.append(given)
        return errorbar(self, *given, **how)

    monkeypatch.setattr(axes.Axes, "errorbar", record)
    monkeypatch.setattr(axes.Axes, "annotate", lambda self, text, *_, **__: named.append(text))
    folders = [evaluation(tmp_path / "plain", 0.5, 40.0), evaluation(tmp_path / "beam", 0.75, 900.0)]
    write_plot(folders, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 5000
    assert named == ["plain", "beam"]
    assert [(tokens, mean) for tokens, mean, _ in drawn] == [(40.0, 0.5), (900.0, 0.75)]
    assert [pytest.approx([below[0], above[0]]) for *_, (below, above) in drawn] == [[0.1, 0.2]] * 2


def test_an_evaluation_that_is_not_complete_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no complete evaluation in .*begun"):
        write_plot([evaluation(tmp_path / "plain", 0.5, 40.0), EvalFolder(tmp_path / "begun")], tmp_path / "plot.png")
