"""The controls of a trainer rank when some of its engines were restarted."""

from types import SimpleNamespace

from slimrl.config.schema.recipe import Recipe
from slimrl.engines.engine_key import EngineKey
from slimrl.runtime.cluster.engine_actor import EngineAddress
from slimrl.runtime.cluster.trainer_actor import TrainerActor


def address(name: str, pid: int) -> EngineAddress:
    return EngineAddress(name=name, url="http://127.0.0.1:1", key=EngineKey("k"), tensor=1, nodes=("n",), pids=(1, pid))


def test_an_engine_that_was_not_restarted_keeps_its_control_and_the_others_are_closed():
    used = []
    rank = object.__new__(TrainerActor)
    rank.recipe, rank.controls, rank.connected = Recipe(), [], []
    rank.resync_session = SimpleNamespace(use=lambda controls: used.append(list(controls)))
    rank.connect_engines([address("engine 0", 10), address("engine 1", 20)])
    first, second = rank.controls
    rank.connect_engines([address("engine 0", 10), address("engine 1", 21), address("engine 2", 30)])
    assert rank.controls[0] is first
    assert rank.controls[1] is not second
    assert [control.name for control in rank.controls] == ["engine 0", "engine 1", "engine 2"]
    assert used == [[first, second], rank.controls]
    assert second._http.is_closed
    assert not any(control._http.is_closed for control in rank.controls)
