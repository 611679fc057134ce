"""What a run does about tensors that the engines did not load as the trainer has them."""

from types import SimpleNamespace

import pytest

from slimrl.base.errors import RunError, StageError
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.rollout import RolloutMode
from slimrl.resync.report import ResyncReport
from slimrl.runtime.cluster.memory_phases import MemoryPhase
from slimrl.runtime.weight_sync import WeightSync


def report(**changes) -> ResyncReport:
    values = {
        "version": 7, "bytes": 1, "buckets": 1, "seconds": 1.0, "stage_seconds": {}, "verified_tensors": 2,
        "mismatching": (), "failed_engines": {}, "stale_requests": 0, "peak_extra_bytes": 0,
    }  # fmt: skip
    return ResyncReport(**{**values, **changes})


class Engines:
    """Those of a run; `calls` has what is asked of them."""

    def __init__(self, count: int, calls: list | None = None) -> None:
        self.receivers = [SimpleNamespace(name=f"engine {number}") for number in range(count)]
        self.num_replaced, self.calls = 0, [] if calls is None else calls
        self.have_ended = False

    def replace(self, failed) -> None:
        self.calls.append(f"replace {list(failed)}")
        self.receivers = [SimpleNamespace(name=engine.name, again=True) for engine in self.receivers]

    def wait_for_receivers(self) -> None:
        self.calls.append("wait")

    def have_all_ended(self) -> bool:
        return self.have_ended

    def restart(self, failed) -> None:
        self.calls.append(f"restart {failed}")
        self.num_replaced += len(failed)

    def have_weights(self, names) -> None:
        self.calls.append(f"have weights {sorted(names)}")


def test_a_run_stops_at_a_tensor_that_differs_and_names_it_and_the_engine():
    found = report(mismatching=("engine 1: model.layers.1.mlp.experts.3.down_proj.weight",))
    trainers = SimpleNamespace(resync=lambda version: found, connect_engines=lambda addresses: None)
    state = SimpleNamespace(weight_version=7)
    memory = SimpleNamespace(enter=lambda stage: None)
    sync = WeightSync(Recipe(), state, trainers, Engines(1), memory, None)
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
    engines = Engines(3, calls)
    memory = SimpleNamespace(enter=lambda stage: calls.append(stage))
    recipe = Recipe()
    recipe.rollout.colocated = True
    step = SimpleNamespace(record=lambda metrics: None)
    progress = SimpleNamespace(say=lambda text: None)
    WeightSync(recipe, SimpleNamespace(weight_version=7), trainers, engines, memory, progress).send(step)
    assert calls == [
        MemoryPhase.exchange, "use", "resync 7", MemoryPhase.replace, "replace ['engine 0', 'engine 1']",
        MemoryPhase.exchange, "use", "resync 8", "have weights ['engine 0', 'engine 1', 'engine 2']",
    ]  # fmt: skip


@pytest.mark.parametrize("have_ended", [True, False])
def test_beside_the_training_a_version_waits_for_an_engine_where_all_have_ended(have_ended: bool):
    engines = Engines(1)
    engines.have_ended = have_ended
    recipe, sent = Recipe(), []
    recipe.rollout.mode = RolloutMode.async_

    def resync(version):
        sent.append(version)
        if len(sent) == 1:
            raise StageError("trainer 0: resync: no engine is left")
        return report()

    trainers = SimpleNamespace(resync=resync, connect_engines=lambda addresses: None)
    state, memory = SimpleNamespace(weight_version=7), SimpleNamespace(enter=lambda stage: None)
    sync = WeightSync(recipe, state, trainers, engines, memory, None)
    if have_ended:
        sync.send(SimpleNamespace(record=lambda metrics: None))
        assert (sent, engines.calls) == ([7, 7], ["wait", "wait", "have weights ['engine 0']"])
    else:
        with pytest.raises(StageError, match="no engine is left"):
            sync.send(None)


def test_an_engine_with_devices_of_its_own_is_restarted_beside_the_run_and_gets_a_later_version():
    calls = []
    reports = iter([report(failed_engines={"engine 1": "no answer within 6 s"}), report(version=8), report(version=9)])

    def resync(version):
        calls.append(f"resync {version}")
        return next(reports)

    trainers = SimpleNamespace(
        resync=resync, connect_engines=lambda addresses: calls.append([address.name for address in addresses])
    )
    engines, recorded = Engines(2, calls), []
    state, memory = SimpleNamespace(weight_version=7), SimpleNamespace(enter=lambda stage: None)
    sync = WeightSync(Recipe(), state, trainers, engines, memory, None)
    step = SimpleNamespace(record=lambda metrics: recorded.append(metrics["resync/replaced_engines"]))
    both = engines.receivers
    for version, engines.receivers in ((7, both), (8, both[:1]), (9, both)):
        state.weight_version = version
        sync.send(step)
    assert calls == [
        ["engine 0", "engine 1"], "resync 7", "restart {'engine 1': 'no answer within 6 s'}",
        "have weights ['engine 0']",
        ["engine 0"], "resync 8", "have weights ['engine 0']",
        ["engine 0", "engine 1"], "resync 9", "have weights ['engine 0', 'engine 1']",
    ]  # fmt: skip
    assert recorded == [1, 0, 0]
