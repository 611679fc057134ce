"""Engines that fail in a resync on devices that they share: who is started anew, and what is sent again."""

import re
from types import SimpleNamespace

import pytest

from slimrl.base.errors import StageError
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.rollout import RolloutMode
from slimrl.resync.report import ResyncReport
from slimrl.runtime.state import RunState
from slimrl.runtime.step_metrics import Step
from slimrl.runtime.weight_sync import WeightSync


class Run:
    """Trainer, engines, memory and terminal at once; each resync fails for the engines that `failures` names next."""

    def __init__(self, failures: list[dict[str, str]], limit: int = 3) -> None:
        self.failures = failures
        self.calls: list[str] = []
        self.said: list[str] = []
        self.receivers = [SimpleNamespace(name=f"engine {number}") for number in range(2)]
        self.num_replaced, self.limit = 0, limit
        self.state = RunState(weight_version=6)
        self.recipe = Recipe()
        self.recipe.rollout.colocated = True
        self.sync = WeightSync(self.recipe, self.state, self, self, self, self)

    def resync(self, version):
        self.calls.append(f"send {version}")
        failed = self.failures.pop(0) if self.failures else {}
        return ResyncReport(
            version=version, bytes=10, buckets=1, seconds=0.1, stage_seconds={}, verified_tensors=1, mismatching=(),
            failed_engines=failed, stale_requests=0, peak_extra_bytes=0,
        )  # fmt: skip

    def enter(self, stage):
        self.calls.append(f"memory for {stage.name}")

    def replace(self, names):
        if self.num_replaced + len(names) > self.limit:
            raise StageError("no more")
        self.calls.append(f"replace {', '.join(names)}")
        self.num_replaced += len(names)
        self.receivers = [SimpleNamespace(name=engine.name) for engine in self.receivers]
        self.receivers[0].pids = (self.num_replaced,)

    def have_weights(self, names):
        self.served = sorted(names)

    def connect_engines(self, addresses):
        assert addresses == self.receivers
        self.calls.append("use")

    def say(self, text):
        self.said.append(text)

    def wait_for_receivers(self):
        pass

    def restart(self, failed):
        self.num_replaced += len(failed)

    def send(self) -> dict[str, float]:
        step = Step(1)
        self.sync.send(step)
        return step.metrics


def test_the_weights_go_out_again_when_the_failed_engines_have_been_started_anew():
    run = Run([{"engine 1": "engine 1, pause_generation: gone"}])
    metrics = run.send()
    assert run.calls == [
        "memory for exchange", "use", "send 6", "memory for replace", "replace engine 1", "memory for exchange", "use",
        "send 7",
    ]  # fmt: skip
    assert (metrics["resync/version"], metrics["resync/replaced_engines"], run.state.weight_version) == (7, 1, 7)
    assert run.served == ["engine 0", "engine 1"]
    (line,) = run.said
    assert re.fullmatch(r"replaced after the resync of version 6, in \d+ s: engine 1, pause_generation: gone", line)
    assert run.send()["resync/replaced_engines"] == 0


def test_an_engine_that_fails_again_is_replaced_again_until_the_run_may_replace_no_more():
    run = Run([{"engine 0": "engine 0: out of memory"}] * 9, limit=2)
    with pytest.raises(StageError, match="no more"):
        run.send()
    assert run.calls.count("replace engine 0") == 2
    assert [call for call in run.calls if call.startswith("send")] == ["send 6", "send 7", "send 8"]


def test_what_is_replaced_at_a_resync_between_two_steps_counts_in_the_next_step():
    run = Run([{}, {"engine 1": "engine 1, pause_generation: gone"}])
    run.recipe.rollout.colocated, run.recipe.rollout.mode = False, RolloutMode.async_
    assert run.send()["resync/replaced_engines"] == 0
    run.num_replaced += 1
    run.sync.send(None)
    assert run.served == ["engine 0"]
    assert run.send()["resync/replaced_engines"] == 2
    assert run.send()["resync/replaced_engines"] == 0
