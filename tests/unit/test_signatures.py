"""What the source of a class says about calls of its objects."""

import ast

from slimrl.config.signatures import called_wrongly


def test_a_method_may_take_its_object_among_others():
    node = ast.parse("class R:\n    def __call__(*args):\n        pass").body[0]
    assert called_wrongly(node, ("trajectory", "prompt"), {}) is None
    node = ast.parse("class R:\n    def __call__(self, one):\n        pass").body[0]
    assert "too many positional" in called_wrongly(node, ("trajectory", "prompt"), {})
