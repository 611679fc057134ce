"""What the source of a class says about calls of its objects."""

import ast
import sys

import pytest

from slimrl.config.schema.reward import RewardPartConfig
from slimrl.config.signatures import called_wrongly, other_order
from slimrl.rewards.loading import load_part


def test_a_method_may_take_its_object_among_others():
    node = ast.parse("class R:\n    def __call__(*args):\n        pass").body[0]
    assert called_wrongly(node, ("trajectory", "prompt"), {}) is None
    node = ast.parse("class R:\n    def __call__(self, one):\n        pass").body[0]
    assert "too many positional" in called_wrongly(node, ("trajectory", "prompt"), {})


@pytest.mark.parametrize(
    ("method", "problem"),
    [
        ("def __call__(): pass", "its __call__ has no parameter self"),
        ("def __call__(*, trajectory, prompt): pass", "its __call__ has no parameter self"),
        ("@staticmethod\n    def __call__(trajectory, prompt): return 1.0", None),
        (
            "@staticmethod\n    def __call__(self, trajectory, prompt): return 1.0",
            "missing a required argument: 'prompt'",
        ),
        ("@staticmethod\n    def __call__(): return 1.0", "too many positional arguments"),
        ("@classmethod\n    def __call__(cls, trajectory, prompt): return 1.0", None),
        ("@classmethod\n    def __call__(cls, one): return 1.0", "too many positional arguments"),
        ("@other\n    def __call__(): return 1.0", None),
    ],
)
def test_methods_without_their_object_are_refused_by_source_and_by_start(monkeypatch, tmp_path, method, problem):
    source = f"other = lambda _: lambda self, trajectory, prompt: 1.0\nclass R:\n    {method}\n"
    said = called_wrongly(ast.parse(source).body[1], ("trajectory", "prompt"), {})
    assert (said is None) if problem is None else (problem in said)
    (tmp_path / "methods_of_rewards.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "methods_of_rewards", raising=False)
    part = RewardPartConfig(function="methods_of_rewards:R")
    if problem is None:
        assert load_part("r", part).function(None, None) == 1.0
    else:
        with pytest.raises(ValueError, match=problem):
            load_part("r", part)


def test_the_order_of_a_static_method_s_parameters_begins_with_the_first():
    node = ast.parse("class R:\n    @staticmethod\n    def __call__(prompt, completion):\n        pass").body[0]
    assert other_order(node) == "prompt, completion"
