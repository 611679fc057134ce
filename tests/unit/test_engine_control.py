"""Who holds connections to engines lets go of them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from slimrl.config.schema.recipe import Recipe
from slimrl.data.engine import EngineError
from slimrl.engines.engine_key import EngineKey
from slimrl.engines.servers.control import SglangControl
from slimrl.runtime.cluster.engine_actor import EngineAddress
from slimrl.runtime.cluster.trainer_actor import TrainerActor


def test_a_control_that_was_closed_says_so():
    control = SglangControl("engine 3", "http://127.0.0.1:1", timeout_s=1, key=EngineKey("k"))
    control.close()
    control.close()
    with pytest.raises(EngineError, match="engine 3, continue_generation: its control was closed"):
        control.resume()


def test_a_trainer_closes_the_controls_of_engines_that_it_lets_go_of():
    actor = object.__new__(TrainerActor)
    used = []
    actor.recipe = Recipe()
    actor.resync_session = SimpleNamespace(use=used.append, close=lambda: None)
    actor.worker = SimpleNamespace(close=lambda: None)
    actor.controls, actor.connected, actor.meeting = [], [], None
    address = EngineAddress(
        name="engine 0", url="http://127.0.0.1:1", tensor=1, nodes=("a",), pids=(1,), key=EngineKey("k")
    )
    # A restarted engine has other processes.
    for pid in (1, 2):
        actor.connect_engines([replace(address, pids=(pid,))])
    [first], [second] = used
    assert (first._http.is_closed, second._http.is_closed) == (True, False)
    actor.close()
    assert second._http.is_closed
