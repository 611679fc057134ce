"""What a run does about tensors that the engines did not load as the trainer has them."""

from types import SimpleNamespace

import pytest

from slimrl.config.schema.recipe import Recipe
from slimrl.resync.report import ResyncReport
from slimrl.runtime.cluster.errors import RunError
from slimrl.runtime.cluster.memory_phases import MemoryPhase
from slimrl.runtime.weight_sync import WeightSync


def report(**changes) -> ResyncReport:
    values = {
        "version": 7, "bytes": 1, "buckets": 1, "seconds": 1.0, "stage_seconds": {}, "verified_tensors": 2,
        "mismatching": (), "failed_engines": {}, "stale_requests": 0, "peak_extra_bytes": 0,
    }  # fmt: skip
    return ResyncReport(**{**values, **changes})


def test_a_run_stops_at_a_tensor_that_differs_and_names_it_and_the_engine():
    found = report(mismatching=("engine 1: model.layers.1.mlp.experts.3.down_proj.weight",))
    trainers = SimpleNamespace(resync=lambda version: found)
    state = SimpleNamespace(weight_version=7)
    memory = SimpleNamespace(enter=lambda stage: None)
    sync = WeightSync(None, state, trainers, SimpleNamespace(num_replaced=0), memory, None)
    with pytest.raises(RunError, match=r"weight version 7: 1 tensors differ .*engine 1: model\.layers\.1\.mlp.*"):
        sync.send(None)


def test_engines_start_anew_together_while_the_trainer_holds_none_of_the_memory_that_they_share():
    calls = []
    failed = {"engine 0": "out of memory", "engine 1": "was ended by SIGKILL"}
    reports = iter([report(failed_engines=failed), report(version=8)])

    def resync(version):
        calls.append(f"resync {version}")
        return next(reports)

    trainers = SimpleNamespace(resync=resync, connect_engines=lambda addresses: calls.append("use"))
    engines = SimpleNamespace(replace=lambda names: calls.append(f"replace {names}"), addresses=[], num_replaced=0)
    memory = SimpleNamespace(enter=lambda stage: calls.append(stage))
    recipe = Recipe()
    recipe.rollout.num_engines = 3
    step = SimpleNamespace(record=lambda metrics: None)
    progress = SimpleNamespace(say=lambda text: None)
    WeightSync(recipe, SimpleNamespace(weight_version=7), trainers, engines, memory, progress).send(step)
    assert calls == [
        MemoryPhase.exchange, "resync 7", MemoryPhase.replace, "replace ['engine 0', 'engine 1']",
        MemoryPhase.exchange, "use", "resync 8",
    ]  # fmt: skip
