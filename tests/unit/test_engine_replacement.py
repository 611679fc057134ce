"""Engines that fail in a resync: who is started anew, what is sent again, and when a run gives up."""

import re

import pytest

from slimrl.config.schema.recipe import Recipe
from slimrl.resync.report import ResyncReport
from slimrl.runtime.cluster.errors import RunError
from slimrl.runtime.state import RunState
from slimrl.runtime.step_metrics import Step
from slimrl.runtime.weight_sync import WeightSync


class Run:
    """Trainer, engines, memory and terminal at once; each resync fails for the engines that `failures` names next."""

    def __init__(self, failures: list[dict[str, str]], limit: int = 3) -> None:
        self.failures = failures
        self.calls: list[str] = []
        self.said: list[str] = []
        self.addresses = ["engine 0", "engine 1"]
        self.num_replaced = 0
        self.state = RunState(weight_version=6)
        recipe = Recipe()
        recipe.rollout.max_replacements = limit
        self.sync = WeightSync(recipe, self.state, self, self, self, self)

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
        self.calls.append(f"replace {', '.join(names)}")
        self.num_replaced += len(names)

    def connect_engines(self, addresses):
        assert addresses == self.addresses
        self.calls.append("use")

    def say(self, text):
        self.said.append(text)

    def send(self) -> dict[str, float]:
        step = Step(1)
        self.sync.send(step)
        return step.metrics


def test_the_weights_go_out_again_when_the_failed_engines_have_been_started_anew():
    run = Run([{"engine 1": "engine 1, pause_generation: gone"}])
    metrics = run.send()
    assert run.calls == [
        "memory for exchange", "send 6", "memory for replace", "replace engine 1", "memory for exchange", "use",
        "send 7",
    ]  # fmt: skip
    assert (metrics["resync/version"], metrics["resync/replaced_engines"], run.state.weight_version) == (7, 1, 7)
    (line,) = run.said
    assert re.fullmatch(r"replaced after the resync of version 6, in \d+ s: engine 1, pause_generation: gone", line)
    assert run.send()["resync/replaced_engines"] == 0


def test_an_engine_that_fails_again_is_replaced_again_until_the_run_may_replace_no_more():
    failure = {"engine 0": "engine 0: out of memory"}
    run = Run([failure] * 9, limit=2)
    with pytest.raises(RunError, match=r"version 8.*max_replacements = 2 .*\(2 were\): engine 0: .*out of memory"):
        run.send()
    assert run.calls.count("replace engine 0") == 2
    assert run.calls[-1] == "send 8"


def test_a_limit_of_0_replaces_none():
    run = Run([{"engine 1": "gone"}], limit=0)
    with pytest.raises(RunError, match="max_replacements = 0"):
        run.send()
    assert run.calls == ["memory for exchange", "send 6"]


def test_engines_that_fail_together_count_each():
    both = {"engine 0": "engine 0: gone", "engine 1": "engine 1: gone"}
    run = Run([both], limit=1)
    with pytest.raises(RunError, match=r"max_replacements = 1 .*\(0 were\): engine 0: .*gone; engine 1: .*gone"):
        run.send()
    assert run.calls == ["memory for exchange", "send 6"]
    run = Run([both], limit=2)
    assert run.send()["resync/replaced_engines"] == 2
    assert run.calls.count("replace engine 0, engine 1") == 1
    run.failures.append({"engine 1": "engine 1: again"})
    with pytest.raises(RunError, match=r"\(2 were\): engine 1: again"):
        run.send()
